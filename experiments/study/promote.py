"""`eagle3 promote`: a study's winners into params.yaml, comments and order kept.

The arm gets the winner's settings and its budget, so that its train stage is the winning trial over
again: same seed, same rows, same threads, the same τ on dev to the last digit.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from eagle3.errors import HarnessError
from eagle3.workspace import write_atomically
from experiments.study.bench import Bench
from experiments.study.opening import prepare, reach
from experiments.study.progress import say
from experiments.study.search import best_trial
from experiments.study.store import SLOT, is_there, shown, store_url, study_digest
from stages.params import read_params


def promote(
    root: Path,
    *,
    name: str | None,
    storage: str | None,
    arms: list[str] | None,
    keep_budget: bool,
) -> None:
    """Writes the winners of some arms, or of all.

    Args:
        keep_budget: only the settings, not the rows that the trial was trained on; then the train
            stage is no longer the trial.

    Raises:
        HarnessError: no such study, no finished trial, or params.yaml would become unusable.
    """
    import optuna

    bench = prepare(root, name)
    if not is_there(store_url(root, storage)):
        raise HarnessError(
            "no study has been made yet",
            where=shown(store_url(root, storage)),
            rule="the store of the study whose winners are wanted",
            fix="run `eagle3 study` first, or name its --storage",
        )
    store = reach(bench, storage).storage
    known = set(optuna.get_all_study_names(store))
    winners: dict[str, tuple[FrozenTrial, str]] = {}
    for arm in arms or list(bench.study.arms):
        title = f"{bench.study.name}.{arm}"
        if title not in known:
            raise HarnessError(
                "there is no such study",
                where=title,
                rule=", ".join(sorted(known)) or "none yet",
                fix="run `eagle3 study` first, or name another",
            )
        study = optuna.load_study(study_name=title, storage=store)
        best = best_trial(study)
        if best is None:
            raise HarnessError(
                "no trial came to its end",
                where=title,
                rule="one finished trial or more",
                got="none",
                fix="let the study go on",
            )
        winners[arm] = best, study_digest(study)
    text = rewritten(bench.params_path.read_text(), bench, winners, keep_budget=keep_budget)
    _check(bench, text)
    write_atomically(bench.params_path, text)
    for arm, (best, digest) in winners.items():
        say(f"{arm}: trial {best.user_attrs[SLOT]}, dev τ {best.value:.4f}, study {digest[:12]}")
    say("params.yaml changed; `dvc repro` trains with it")


def rewritten(
    text: str,
    bench: Bench,
    winners: Mapping[str, tuple[FrozenTrial, str]],
    *,
    keep_budget: bool,
) -> str:
    """params.yaml's text with the winners in it.

    Args:
        winners: by arm, the trial and its study's digest.
    """
    yaml = round_trip()
    params = yaml.load(text)
    for arm, (best, _) in winners.items():
        entry = params["arms"][arm]
        _set(entry, "train", _plain(best.user_attrs["train"]))
        if not keep_budget:
            entry.pop("epochs", None)
            _set(entry, "tokens", best.user_attrs["tokens"])
    digests = [digest for _, digest in winners.values()]
    params["study"]["promoted"] = _plain(
        {
            "study": bench.study.name,
            "digest": " ".join(digest[:16] for digest in digests),
            "trials": {arm: best.user_attrs[SLOT] for arm, (best, _) in winners.items()},
            "dev_tau": {arm: best.value for arm, (best, _) in winners.items()},
        }
    )
    out = io.StringIO()
    yaml.dump(params, out)
    return out.getvalue()


def round_trip() -> YAML:
    """Reads and writes params.yaml so that what is not changed stays as it stands."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), _null)
    return yaml


def _null(representer: RoundTripRepresenter, _: None) -> ScalarNode:
    """A setting that is null is written as such: an empty place reads like a mistake."""
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _set(entry: CommentedMap, key: str, value: Any) -> None:
    """Sets a key; a new one goes to the front, where no comment of the next section follows it."""
    if key in entry:
        entry[key] = value
    else:
        entry.insert(0, key, value)


def _plain(values: Mapping[str, Any]) -> CommentedMap:
    made = CommentedMap()
    for key, value in values.items():
        made[key] = _plain(value) if isinstance(value, Mapping) else value
    return made


def _check(bench: Bench, text: str) -> None:
    """Refuses a text that does not say what was meant, before the file is touched."""
    from experiments.settings_check import check_settings

    part = bench.root / ".work" / "promoted.yaml"
    write_atomically(part, text)
    try:
        check_settings(read_params(part), "params.yaml with the winners")
    finally:
        part.unlink()
