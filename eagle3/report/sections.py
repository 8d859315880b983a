"""The report's sections: each a function of the data, None where its input is missing.

The first screen is in `eagle3.report.result`. What a section says is computed from its inputs; only
what the numbers mean is written here.
"""

from __future__ import annotations

from html import escape

from eagle3.report import charts, words
from eagle3.report.contract import checked_against_server, contract
from eagle3.report.data import ReportData
from eagle3.report.lineage import lineage
from eagle3.report.mistakes import mistakes
from eagle3.report.section import Section
from eagle3.report.served import served
from eagle3.report.summary import greedy_exact


def tones(data: ReportData) -> dict[str, int]:
    """Every arm's colour, the same all over the report."""
    return {arm: number % charts.COLORS for number, arm in enumerate(data.arms)}


def speed(data: ReportData) -> Section | None:
    """Whether each arm pays, and with how many drafts it would pay most."""
    timed = [arm for arm in data.arms if arm in data.timings]
    if data.comparison is None or not timed:
        return None
    arms = data.comparison["arms"]
    rows = []
    for arm in timed:
        timing, result = data.timings[arm], arms[arm]
        rows.append(
            [
                escape(words.arm(arm)),
                f"{timing['plain_tokens_per_s']:.1f}",
                f"{timing['speculative_tokens_per_s']:.1f}",
                f"<strong>{timing['speedup']:.2f}×</strong>",
                f"{timing['r']:.2f}",
                f"{timing['c']:.3f}",
                f"{timing['break_even_tau']:.2f}",
                str(result["recommended_k"]) if result["recommended_k"] else "none",
            ]
        )
    first = data.timings[timed[0]]
    said = "".join(
        f"<li><strong>{escape(words.arm(arm))}</strong> is {escape(arms[arm]['words'])}.</li>"
        for arm in timed
    )
    head = ["arm", "plain tokens/s", "speculative tokens/s", "speed-up", "r", "c", "break-even τ"]
    body = f"<ul>{said}</ul>" + words.table(
        [*head, "best k"],
        rows,
        caption=(
            f"Real decoding of {first['prompts']} prompts × {first['max_tokens']} tokens in "
            f"{first['dtype']} on {first['device']}, k = {first['k']}, both ways in turns on each "
            "prompt, prompts' own passes included"
        ),
    )
    body += (
        "<p class='note'>r is the time to verify k + 1 tokens and c that of one draft, over the "
        "time to decode one token. Speculation pays when τ is above r + k·c, the break-even. "
        "Best k is modelled from these costs and from the acceptance at each position; it is no "
        "measurement.</p>"
    )
    speeds = {words.arm(arm): list(enumerate(arms[arm]["speedup_by_drafts"], 1)) for arm in timed}
    most = max(len(points) for points in speeds.values())
    if most > 1:
        modelled = words.table(
            ["arm", *(f"{k} draft{'s' if k > 1 else ''}" for k in range(1, most + 1))],
            [[escape(name), *(f"{s:.2f}×" for _, s in points)] for name, points in speeds.items()],
            caption="Modelled speed-up by number of drafts, prompts' own passes left out",
        )
        body += modelled
    return Section("speed", "Faster than no speculation?", body)


CURVES = (
    ("dev_tau", "τ on dev prompts", "higher is better"),
    ("loss", "training loss", "lower is better"),
    ("accuracy_0", "first draft right, training rows", "share"),
    ("lr", "learning rate", "by optimizer step"),
)


def training(data: ReportData) -> Section | None:
    """Curves of all arms, one chart a metric."""
    if not data.curves:
        return None
    arms = [arm for arm in data.arms if arm in data.curves]
    colour = tones(data)
    figures = []
    for metric, title, note in CURVES:
        having = [arm for arm in arms if metric in data.curves[arm]]
        if not having:
            continue
        ends = ", ".join(
            f"{words.arm(arm)} ends at {data.curves[arm][metric][-1][1]:.3g}" for arm in having
        )
        figures.append(
            f"<figure><figcaption>{escape(title)} <span>{escape(note)}</span></figcaption>"
            + charts.lines(
                {arm: charts.thinned(data.curves[arm][metric]) for arm in having},
                [colour[arm] for arm in having],
                x_label="optimizer step",
                alt=f"{title} by optimizer step: {ends}.",
            )
            + "</figure>"
        )
    if not figures:
        return None
    key = charts.legend([words.arm(arm) for arm in arms], [colour[arm] for arm in arms])
    return Section("training", "Training", f"{key}<div class='figures'>{''.join(figures)}</div>")


def acceptance(data: ReportData) -> Section | None:
    """By draft position and benchmark, unconditional in charts and both in tables."""
    arms = [arm for arm in data.arms if arm in data.summaries]
    if not arms:
        return None
    colour = tones(data)
    names = [*data.summaries[arms[0]]["benchmarks"]]
    figures, tables = [], []
    for name in [*names, "all"]:
        groups = {
            arm: data.summaries[arm]["all"] if name == "all" else found
            for arm in arms
            if name == "all" or (found := data.summaries[arm]["benchmarks"].get(name))
        }
        if not groups:
            continue
        some = next(iter(groups.values()))
        positions = [f"draft {i + 1}" for i in range(len(some["per_position_unconditional"]))]
        rates = {arm: group["per_position_unconditional"] for arm, group in groups.items()}
        told = "; ".join(
            f"{words.arm(arm)} {', '.join(words.percent(rate) for rate in values)}"
            for arm, values in rates.items()
        )
        if name != "all" or len(names) > 1:
            figures.append(
                f"<figure><figcaption>{escape(words.benchmark(name))} "
                f"<span>{some['prompts']} prompts, % of steps</span></figcaption>"
                + charts.columns(
                    positions,
                    rates,
                    [colour[arm] for arm in groups],
                    alt=f"{words.benchmark(name)}, steps that accept each draft: {told}.",
                )
                + "</figure>"
            )
        tables += [
            [
                f"{escape(words.arm(arm))}, {escape(words.benchmark(name))}",
                f"{group['tau']:.3f}",
                words.percent(group["acceptance_rate"], 1),
                " · ".join(words.percent(rate) for rate in group["per_position_unconditional"]),
                " · ".join(words.percent(rate) for rate in group["per_position_conditional"]),
                words.thousands(group["verify_steps"]),
            ]
            for arm, group in groups.items()
        ]
    head = ["arm and prompts", "τ", "acceptance rate", "unconditional", "conditional", "steps"]
    key = charts.legend([words.arm(arm) for arm in arms], [colour[arm] for arm in arms])
    caption = f"Greedy, k = {data.summaries[arms[0]]['k']}, counted by replay"
    body = (
        f"{key}<div class='figures'>{''.join(figures)}</div>"
        + words.folded("All rates", words.table(head, tables, caption=caption))
        + (
            "<p class='note'>Unconditional: of all verification steps. Conditional: of the steps "
            "that accepted every draft before. τ is 1 + accepted drafts / steps over all prompts, "
            "the bonus token included and the prompt's own token left out.</p>"
        )
    )
    return Section("acceptance", "Acceptance by position and benchmark", body)


def coverage(data: ReportData) -> Section | None:
    """What the draft vocabulary can say, and how much the answers repeat themselves."""
    arms = [arm for arm in data.arms if arm in data.summaries]
    parts = []
    if data.coverage is not None:
        splits = data.coverage["splits"]
        parts.append(
            words.table(
                ["split", "supervised tokens", "covered"],
                [
                    [
                        escape(name),
                        words.thousands(found["supervised"]),
                        words.percent(found["coverage"], 1),
                    ]
                    for name, found in splits.items()
                ],
                caption=(
                    f"Draft vocabulary of {words.thousands(data.coverage['size'])} tokens, chosen "
                    "from the training split"
                ),
            )
        )
    rows = []
    for arm in arms:
        groups = {**data.summaries[arm]["benchmarks"], "all": data.summaries[arm]["all"]}
        shares = [
            f"{words.benchmark(name)} {words.percent(group['vocabulary_coverage'], 1)}"
            for name, group in groups.items()
            if "vocabulary_coverage" in group
        ]
        if shares:
            rows.append([escape(words.arm(arm)), escape(", ".join(shares))])
    if rows:
        parts.append(
            words.table(["arm", "covered"], rows, caption="Test answers, by each arm's vocabulary")
        )
    if not parts:
        return None
    text = (
        "<p>A drafter never proposes a token outside its vocabulary: what is not covered here is a "
        "step that ends.</p>"
    )
    if arms and "distinct_trigrams" in data.summaries[arms[0]]["all"]:
        share = data.summaries[arms[0]]["all"]["distinct_trigrams"]
        text += (
            f"<p>{words.percent(share)} of the trigrams within a test answer are distinct. Answers "
            "that repeat themselves are easy to draft and lift τ.</p>"
        )
    return Section("coverage", "Draft vocabulary", text + "".join(parts))


def exactness(data: ReportData) -> Section | None:
    """That speculation changed no output."""
    arms = [arm for arm in data.arms if "decode" in data.summaries.get(arm, {})]
    if not arms:
        return None
    total = greedy_exact(data)
    body = (
        f"<p>{total['equal']} of {total['prompts']} greedy texts in fp32 are equal to plain "
        f"decoding, token for token. {total['near_ties']} part where the verifier's two best "
        "tokens are a near-tie, which passes of different shapes may settle differently; anything "
        "else would have stopped the evaluation.</p>"
    )
    ties = [
        [
            escape(f"{words.arm(arm)}, {tie['id']}"),
            str(tie["position"]),
            f"{tie['plain']} / {tie['speculative']}",
            f"{tie['gap']:.1e}",
        ]
        for arm in arms
        for tie in data.summaries[arm]["decode"]["exactness"]["near_ties"]
    ]
    if ties:
        body += words.table(
            ["arm and prompt", "at new token", "plain / speculative", "gap in fp64"],
            ties,
            caption="Near-ties",
        )
    return Section("exactness", "Does it change the output?", body)


def costs(data: ReportData) -> Section | None:
    """Wall time of every stage."""
    seconds = {stage: data.seconds(stage) for stage in data.provenance}
    known = [(stage, value) for stage, value in seconds.items() if value is not None]
    if not known:
        return None
    known.sort(key=lambda item: -item[1])
    total = sum(value for _, value in known)
    items = [
        charts.Bar(stage.replace("_", " "), value, words.duration(value)) for stage, value in known
    ]
    told = ", ".join(f"{stage} {words.duration(value)}" for stage, value in known)
    chart = charts.bars(items, start=0, end=known[0][1], alt=f"Seconds by stage: {told}.")
    return Section(
        "costs", "What it cost", f"<p>{words.duration(total)} over all stages.</p>{chart}"
    )


def origin(data: ReportData) -> Section | None:
    """Code, machine, versions and runs behind the numbers."""
    if not data.provenance:
        return None
    every = list(data.provenance.values())
    newest = max(every, key=lambda item: str(item.get("started", "")))
    commits = sorted({str(item["commit"])[:12] for item in every if item.get("commit")})
    changed = sorted({name for item in every for name in item.get("changed") or []})
    torch = newest.get("torch") or {}
    torch_words = " ".join(
        str(torch[name]) for name in ("version", "instruction_set", "device") if torch.get(name)
    )
    pairs = [
        ("verifier", data.verifier or "–"),
        ("finished", str(newest.get("started", "–"))),
        ("commit", ", ".join(commits) or "not in git"),
        ("changed since that commit", ", ".join(changed) if changed else "nothing"),
        ("torch", torch_words or "–"),
        ("Python", str(newest.get("python", "–"))),
        ("processor", str(newest.get("processor", "–"))),
        ("threads", f"{newest.get('threads', '–')} of {newest.get('cores', '–')} cores"),
        ("lock file", str(newest.get("lock") or "–")[:16]),
    ]
    body = words.facts([(name, escape(value)) for name, value in pairs])
    runs = [
        [
            escape(stage),
            escape(str(item.get("started", "–"))),
            words.duration(item.get("seconds")),
            escape(", ".join(_run_ids(item))) or "–",
        ]
        for stage, item in sorted(data.provenance.items())
    ]
    stages = words.table(["stage", "started", "took", "MLflow run"], runs, caption="")
    body += words.folded("Stages and their MLflow runs", stages)
    return Section("origin", "Where it came from", body)


def limits(data: ReportData) -> Section | None:
    """What a reader might take from the numbers and must not."""
    if data.comparison is None:
        return None
    seeds, prompts = data.comparison["seeds"], data.comparison["prompts"]
    timing = next(iter(data.timings.values()), {})
    named = f" ({data.verifier})" if data.verifier else ""
    items = [
        f"One verifier{named}, answering {prompts} prompts greedily. Other verifiers and other "
        "prompts accept other lengths."
    ]
    if any("sibling" in stage for stage in data.provenance):
        items.append(
            "The checkpoint that finetuning starts from was trained on a stand-in: the same "
            "verifier with rounded weights, in the place of a related model with a published "
            "drafter."
        )
    if not checked_against_server(data):
        items.append(
            "The hidden states were not compared with those of a serving engine. A server that "
            "reads other layers, or another final state, accepts less."
        )
    if seeds == 1:
        items.insert(
            0,
            "Each arm was trained once. Another seed would move τ by an amount that the intervals, "
            "which cover prompts only, do not hold.",
        )
    else:
        items.insert(0, f"{seeds} seeds are few: the interval over seeds is rough.")
    if timing.get("device", "cpu") == "cpu":
        items.append(
            "Speed was measured on a CPU, one request at a time. On a GPU under load the cost of "
            "verifying differs, and with it the break-even."
        )
    if float(timing.get("temperature", 0)) == 0:
        items.append("Everything is greedy; at a temperature other drafts are accepted.")
    return Section(
        "limits",
        "What this does not show",
        "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>",
    )


def _run_ids(item: object) -> list[str]:
    runs = item.get("mlflow_runs", []) if isinstance(item, dict) else []
    return [str(run.get("run_id") or run.get("id") or "") for run in runs if run]


SECTIONS = (
    speed,
    acceptance,
    training,
    coverage,
    contract,
    mistakes,
    exactness,
    served,
    costs,
    lineage,
    origin,
    limits,
)
