"""Hidden states of other programs: as they are, and asked about where they say nothing."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.chat import generation_opening
from eagle3.conventions import Conventions, Settled, settle
from eagle3.errors import HarnessError
from eagle3.foreign import ForeignStates
from eagle3.formats.foreign_states import ForeignFolder, open_foreign
from eagle3.last_norm import norm_evidence
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head, write_head
from eagle3.verifier_model import load_tokenizer
from experiments.training_data import input_digests
from tests.foreign_data import (
    LAYERS,
    Made,
    make_samples,
    write_arrow,
    write_specforge,
    write_v1,
)

SAID = Conventions(aux_layers=LAYERS)


@dataclasses.dataclass(frozen=True)
class World:
    folder: Path
    samples: list[Made]
    head: VerifierHead
    opening: list[int]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("foreign") / "verifier"
    samples = make_samples(folder)
    spec = VerifierSpec.open(folder)
    write_head(spec, folder.with_suffix(".head"))
    opening = generation_opening(load_tokenizer(spec))
    return World(folder, samples, read_head(folder.with_suffix(".head")), opening)


def opened(path: Path) -> ForeignFolder:
    folder = open_foreign(path)
    assert folder is not None
    return folder


def states(world: World, path: Path, said: Conventions = SAID) -> ForeignStates:
    folder = opened(path)
    settled = settle(folder, world.head, said, world.opening)
    return ForeignStates(folder, world.head, settled, device="cpu")


@pytest.mark.parametrize(
    ("write", "kind", "norm"),
    [
        (write_v1, "speculators v1", "pre_norm"),
        (write_arrow, "speculators (arrow)", "pre_norm"),
        (write_specforge, "SpecForge", "post_norm"),
    ],
)
def test_every_format_gives_what_the_verifier_computed(
    world: World, tmp_path: Path, write: Callable[..., Path], kind: str, norm: str
) -> None:
    found = states(world, write(tmp_path / "data", world.samples))
    assert (found.meta.engine, found.meta.final_hidden) == (kind, norm)
    assert (found.meta.aux_layers, found.meta.dtype) == (LAYERS, "float32")
    assert len(found) == len(world.samples)
    for document, made, length in zip(found, world.samples, found.lengths, strict=True):
        assert torch.equal(document.token_ids, made.ids.int())
        assert torch.equal(document.loss_mask, made.mask.to(torch.uint8))
        assert torch.equal(document.aux, torch.stack(made.aux, 1))
        assert torch.equal(document.final, made.pre if norm == "pre_norm" else made.post)
        assert torch.equal(document.verifier_top1.long(), made.logits.argmax(-1))
        torch.testing.assert_close(document.verifier_lse, made.logits.logsumexp(-1))
        assert length == len(made.ids)
    ids, mask = found.tokens(3)
    assert torch.equal(ids, found[3].token_ids) and torch.equal(mask, found[3].loss_mask)


def test_samples_go_by_number_not_by_text(world: World, tmp_path: Path) -> None:
    write_v1(tmp_path / "data", [*world.samples, *world.samples])
    folder = opened(tmp_path / "data")
    assert folder.names == [f"data_{i}" for i in range(16)]


# --- what the data does not say -------------------------------------------------------------------


@pytest.mark.parametrize("final", ["pre", "post"])
def test_the_norm_state_is_found_from_the_data(
    world: World, tmp_path: Path, final: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write_v1(tmp_path / "data", world.samples, final=final)
    assert states(world, path).meta.final_hidden == f"{final}_norm"
    share = {"pre": "0%", "post": "100%"}[final]
    (line,) = [m for m in caplog.messages if m.startswith("final states: ")]
    assert re.fullmatch(
        rf"final states: {final}_norm, found from the data \({share} of \d+ rows have the length "
        r"that the norm gives; next-token loss \d+\.\d{3} nats read as pre_norm, "
        r"\d+\.\d{3} as post_norm\)",
        line,
    )
    other: Any = "post_norm" if final == "pre" else "pre_norm"
    said = Conventions(aux_layers=LAYERS, final_hidden=other)
    with pytest.raises(HarnessError, match=rf"deny[\s\S]*--final-hidden {final}_norm: "):
        states(world, path, said)


def test_the_evidence_is_the_verifiers_own(world: World, tmp_path: Path) -> None:
    folder = opened(write_v1(tmp_path / "data", world.samples, final="post"))
    samples = [folder.read(i) for i in range(len(folder.paths))]
    found = norm_evidence(samples, [s.loss_mask.bool() for s in samples], world.head)
    losses: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for made in world.samples:
        at = made.mask[1:-1].nonzero()[:, 0]
        for ahead, kept in losses.items():
            kept.append(
                torch.nn.functional.cross_entropy(
                    made.logits[at], made.ids[at + ahead], reduction="none"
                )
            )
    wanted = [float(torch.cat(losses[ahead]).mean()) for ahead in (0, 1, 2)]
    assert found.rows == len(torch.cat(losses[0])) and found.unit_share == 1.0
    assert found.losses["post_norm"] == pytest.approx(wanted[1], rel=1e-4)
    assert found.slipped == pytest.approx({-1: wanted[0], 1: wanted[2]}, rel=1e-4)


def test_states_of_both_kinds_are_asked_about(world: World, tmp_path: Path) -> None:
    mixed = [
        dataclasses.replace(s, pre=s.post) if i % 2 else s for i, s in enumerate(world.samples)
    ]
    folder = opened(write_v1(tmp_path / "data", mixed))
    with pytest.raises(HarnessError, match=r"cannot be told[\s\S]*5\d% of[\s\S]*--final-hidden"):
        settle(folder, world.head, SAID, world.opening)


@pytest.mark.parametrize("mask", ["token", "prediction"])
def test_what_the_mask_is_aligned_to_is_found(world: World, tmp_path: Path, mask: str) -> None:
    path = write_v1(tmp_path / "data", world.samples, mask=mask)
    assert torch.equal(states(world, path)[0].loss_mask, world.samples[0].mask.to(torch.uint8))
    other: Any = "prediction" if mask == "token" else "token"
    said = Conventions(aux_layers=LAYERS, mask_alignment=other)
    with pytest.raises(HarnessError, match=rf"deny[\s\S]*--mask-alignment {mask}: "):
        states(world, path, said)


@pytest.mark.parametrize(("late", "said"), [(1, "token"), (-2, "token"), (1, "prediction")])
def test_a_mask_that_slipped_is_warned_of(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, late: int, said: Any
) -> None:
    """No reading puts answers where they begin: asked about, and once said, told in numbers."""
    ends = world.head.config.eos_token_ids
    slipped = []
    for made in world.samples:
        ids, last = made.ids.clone(), int(made.mask.nonzero()[-1, 0])
        ids[last - 2] = ends[0]  # answers of a tiny model never end of themselves
        mask = made.mask.clone()
        mask[last - 1 :] = 0
        slipped.append(dataclasses.replace(made, ids=ids, mask=mask.roll(late)))
    folder = opened(write_v1(tmp_path / "data", slipped))
    off = {"token": late, "prediction": late + 1}
    words = {
        name: f"8 of 8 runs start {abs(by)} {'late' if by > 0 else 'early'} and 8 of 8 runs end "
        f"{abs(by)} {'late' if by > 0 else 'early'}"
        for name, by in off.items()
    }
    with pytest.raises(HarnessError, match=rf"aligned to[\s\S]*0 of 8[\s\S]*{words['token']}"):
        settle(folder, world.head, SAID, world.opening)
    conventions = SAID.model_copy(update={"mask_alignment": said})
    assert settle(folder, world.head, conventions, world.opening).mask_alignment == said
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    other = "prediction" if said == "token" else "token"
    assert (
        f"aligned to the {said}, as said, {words[said]}; to the {other}, {words[other]}." in warning
    )


def test_masks_in_use_are_not_warned_of(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With or without the end of an answer, by token or prediction, or of another template."""
    for name, mask in (("whole", "token"), ("predicting", "prediction")):
        shorter = [dataclasses.replace(s, mask=s.mask.roll(-1) * s.mask) for s in world.samples]
        for kind, samples in (("", world.samples), ("-short", shorter)):
            folder = opened(write_v1(tmp_path / f"{name}{kind}", samples, mask=mask))
            for said in (None, mask):
                conventions = Conventions(aux_layers=LAYERS, mask_alignment=said)  # type: ignore[arg-type]
                settle(folder, world.head, conventions, world.opening)
    conventions = Conventions(aux_layers=LAYERS, mask_alignment="prediction")
    settle(folder, world.head, conventions, [7, 8, 9])
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == []


def test_what_nobody_can_tell_is_asked_for(world: World, tmp_path: Path) -> None:
    folder = opened(write_v1(tmp_path / "data", world.samples))
    with pytest.raises(HarnessError, match="which layers") as caught:
        settle(folder, world.head, Conventions(), world.opening)
    text = str(caught.value)
    assert "3 post-layer indices" in text and "layer_ids [0, 2, 4, 4]" in text
    assert "speculators 0.3.0" in text and "--aux-layers" in text
    with pytest.raises(HarnessError, match=r"layers named do not fit[\s\S]*3 different layers"):
        settle(folder, world.head, Conventions(aux_layers=[0, 2]), world.opening)
    with pytest.raises(HarnessError, match=r"layers named do not fit[\s\S]*\[0, 2, 5\]"):
        settle(folder, world.head, Conventions(aux_layers=[0, 2, 5]), world.opening)
    for opening, why in ((None, "tokenizer is not at hand"), ([7, 8, 9], "0 of 8 runs start")):
        with pytest.raises(HarnessError, match=rf"aligned to[\s\S]*{why}[\s\S]*--mask-alignment"):
            settle(folder, world.head, SAID, opening)
    with pytest.raises(HarnessError, match=r"not at hand: its code is not run; set the key"):
        settle(folder, world.head, SAID, None, "its code is not run; set the key")
    said = Conventions(aux_layers=LAYERS, mask_alignment="token")
    assert settle(folder, world.head, said, None) == Settled(
        tuple(LAYERS), "pre_norm", "token", "refuse"
    )


def test_states_that_do_not_predict_their_tokens_are_refused(world: World, tmp_path: Path) -> None:
    """Rows that slipped by one: everything has its right shape."""
    slipped = [
        dataclasses.replace(s, pre=s.pre.roll(1, 0), post=s.post.roll(1, 0)) for s in world.samples
    ]
    folder = opened(write_v1(tmp_path / "data", slipped, final="post"))
    with pytest.raises(HarnessError, match="do not predict the tokens") as caught:
        settle(folder, world.head, SAID, world.opening)
    assert f"{math.log(512):.3f} nats" in str(caught.value)
    assert "for the token -1 from there" in str(caught.value)


# --- samples that cannot be used ------------------------------------------------------------------


def _changed(world: World, path: Path, **changes: Any) -> Path:
    """A v1 folder whose sample 2 differs."""
    write_v1(path, world.samples)
    file = path / "data_2.pt"
    data = torch.load(file, weights_only=True)
    torch.save({k: v for k, v in (data | changes).items() if v is not None}, file)
    return path


def test_samples_that_do_not_fit_are_named(world: World, tmp_path: Path) -> None:
    made = world.samples[2]
    rows = len(made.ids)
    short = [*[state[:-1] for state in made.aux], made.pre[:-1]]
    wide = [torch.cat([state, state], -1) for state in (*made.aux, made.pre)]
    fewer = [*made.aux[:2], made.pre]
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "rows": ({"hidden_states": short}, rf"differ in number[\s\S]*{rows} tokens"),
        "mask": ({"loss_mask": made.mask[:-2]}, rf"loss mask and tokens[\s\S]*{rows - 2}"),
        "lacks": ({"loss_mask": None}, r"lacks what its format holds[\s\S]*no loss_mask"),
        "layers": ({"hidden_states": fewer}, r"other states[\s\S]*2 of size 64"),
        "hidden": ({"hidden_states": wide}, r"other states[\s\S]*3 of size 128"),
        "vocab": ({"input_ids": made.ids + 500}, r"outside the verifier's vocab[\s\S]*0 to 511"),
    }
    for name, (changes, message) in cases.items():
        path = _changed(world, tmp_path / name, **changes)
        with pytest.raises(HarnessError, match=message) as caught:
            folder = opened(path)
            settled = Settled(tuple(LAYERS), "pre_norm", "token", "refuse")
            ForeignStates(folder, world.head, settled, device="cpu")
        assert "data_2.pt" in str(caught.value)


def test_samples_of_other_kinds_are_named(world: World, tmp_path: Path) -> None:
    """Each of these was once trained on, or ended in a traceback."""
    made = world.samples[2]
    every = [*made.aux, made.pre]
    labels = torch.where(made.mask.bool(), made.ids, -100)
    none = {"input_ids": made.ids[:0], "loss_mask": made.mask[:0]}
    none |= {"hidden_states": [state[:0] for state in every]}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "list": ({"input_ids": made.ids.tolist()}, r"input_ids[\s\S]*1 axis[\s\S]*got: list"),
        "floats": ({"input_ids": made.ids.float()}, r"no whole numbers[\s\S]*torch.float32"),
        "labels": ({"loss_mask": labels}, r"something else than 0 and 1[\s\S]*got: -100"),
        "weights": ({"loss_mask": made.mask * 0.5}, r"else than 0 and 1[\s\S]*got: 0.5"),
        "integers": ({"hidden_states": [s.long() for s in every]}, r"not read[\s\S]*int64"),
        "double": ({"hidden_states": [s.double() for s in every]}, r"not read[\s\S]*float64"),
        "two": ({"hidden_states": [*made.aux, made.pre.half()]}, r"float16, torch.float32"),
        "other": ({"hidden_states": [s.half() for s in every]}, r"another dtype than the first"),
        "number": ({"hidden_states": 0}, r"a list of tensors[\s\S]*got: int"),
        "texts": ({"hidden_states": ["a"] * 4}, r"hidden_states\[0\][\s\S]*2 axes[\s\S]*got: str"),
        "nothing": ({"hidden_states": []}, r"a list of tensors[\s\S]*list without entries"),
        "sparse": ({"hidden_states": [s.to_sparse() for s in every]}, r"2 axes[\s\S]*sparse"),
        "empty": (none, r"a sample without tokens"),
        "meta": ({"hidden_states": [s.to("meta") for s in every]}, r"2 axes[\s\S]*without values"),
    }
    for name, (changes, message) in cases.items():
        folder = opened(_changed(world, tmp_path / name, **changes))
        settled = Settled(tuple(LAYERS), "pre_norm", "token", "refuse")
        with pytest.raises(HarnessError, match=message) as caught:
            ForeignStates(folder, world.head, settled, device="cpu")
        assert "data_2.pt" in str(caught.value)


def test_an_axis_for_a_batch_is_taken_off(world: World, tmp_path: Path) -> None:
    made = world.samples[2]
    wide = [state[None] for state in (*made.aux, made.pre)]
    changes = {"input_ids": made.ids[None], "loss_mask": made.mask[None], "hidden_states": wide}
    sample = opened(_changed(world, tmp_path / "batch", **changes)).read(2)
    assert torch.equal(sample.token_ids, made.ids) and torch.equal(sample.final, made.pre)
    stacked = torch.stack([*made.aux, made.pre])
    sample = opened(_changed(world, tmp_path / "stacked", hidden_states=stacked)).read(2)
    assert torch.equal(sample.aux[1], made.aux[1]) and torch.equal(sample.final, made.pre)


def test_states_that_are_no_numbers_are_named(world: World, tmp_path: Path) -> None:
    made = world.samples[2]
    changes = {"hidden_states": [*made.aux[:2], made.aux[2] * math.inf, made.pre]}
    folder = opened(_changed(world, tmp_path / "inf", **changes))
    with pytest.raises(HarnessError, match=r"a NaN or infinity[\s\S]*data_2.pt"):
        settle(folder, world.head, SAID, world.opening)


def test_states_of_another_hidden_size(world: World, tmp_path: Path) -> None:
    folder = opened(write_v1(tmp_path / "data", world.samples))
    config = world.head.config.model_copy(update={"hidden_size": 32})
    head = dataclasses.replace(world.head, config=config)
    with pytest.raises(HarnessError, match=r"another verifier[\s\S]*hidden size 32[\s\S]*got: 64"):
        settle(folder, head, SAID, world.opening)


def test_a_file_that_could_run_code_is_not_opened(world: World, tmp_path: Path) -> None:
    class Surprise:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    path = write_v1(tmp_path / "data", world.samples)
    torch.save({"input_ids": Surprise()}, path / "data_0.pt")
    with pytest.raises(HarnessError, match=r"could run code[\s\S]*data_0.pt[\s\S]*weights_only"):
        opened(path).read(0)
    assert not (tmp_path / "ran").exists()


def test_what_else_a_file_holds_is_said(world: World, tmp_path: Path) -> None:
    path = write_v1(tmp_path / "data", world.samples)
    torch.save({"input_ids": world.samples[0].ids.numpy()}, path / "data_0.pt")
    with pytest.raises(HarnessError, match=r"could run code[\s\S]*got: numpy[\w.]*_reconstruct"):
        opened(path).read(0)


def test_a_link_to_nothing_is_named(world: World, tmp_path: Path) -> None:
    path = write_v1(tmp_path / "data", world.samples)
    (path / "data_9.pt").symlink_to(tmp_path / "gone.pt")
    with pytest.raises(HarnessError, match=r"is not there[\s\S]*data_9.pt[\s\S]*link"):
        input_digests(world.head.config, path, None, opened(path))


def test_a_torn_file_is_named_and_an_old_one_is_read(world: World, tmp_path: Path) -> None:
    path = write_v1(tmp_path / "data", world.samples)
    file = path / "data_1.pt"
    data = torch.load(file, weights_only=True)
    torch.save(data, file, _use_new_zipfile_serialization=False)
    assert torch.equal(opened(path).read(1).final, world.samples[1].pre)
    file.write_bytes((path / "data_2.pt").read_bytes()[:-3000])
    with pytest.raises(HarnessError, match=r"cannot be opened[\s\S]*data_1.pt[\s\S]*bytes"):
        opened(path).read(1)
    torch.save([1], file)
    with pytest.raises(HarnessError, match=r"a dictionary by name[\s\S]*got: list"):
        opened(path).read(1)


def test_files_in_gzip_are_read_beside_others(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A SpecForge run that was killed and taken up again with --compress."""
    caplog.set_level(logging.INFO)
    path = write_specforge(tmp_path / "data", world.samples, compress_from=3)
    folder = opened(path)
    assert folder.names == [f"data_{i}" for i in range(8)]
    assert any("5 of 8 files are in gzip" in message for message in caplog.messages)
    for index, made in enumerate(world.samples):
        sample = folder.read(index)
        assert torch.equal(sample.final, made.post) and torch.equal(sample.token_ids, made.ids)
        assert all(torch.equal(a, b) for a, b in zip(sample.aux, made.aux, strict=True))
    file = path / "rows_0-5" / "data_3.ckpt.gz"
    whole = file.read_bytes()
    for torn in (whole[:-3000], whole[:5], b"no gzip"):
        file.write_bytes(torn)
        with pytest.raises(HarnessError, match=r"cannot be opened[\s\S]*data_3.ckpt.gz[\s\S]*gzip"):
            folder.read(3)
    (path / "rows_0-5" / "data_1.ckpt.gz").write_bytes(whole)
    with pytest.raises(HarnessError, match=r"one number[\s\S]*data_1.ckpt and [\s\S]*1.ckpt.gz"):
        opened(path)


def test_padding_rows_are_refused_or_dropped(world: World, tmp_path: Path) -> None:
    def padded(state: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(state[:3]), state, torch.zeros_like(state[:2])])

    made = world.samples[2]
    longer = dataclasses.replace(
        made, ids=padded(made.ids), mask=padded(made.mask), aux=[padded(s) for s in made.aux],
        pre=padded(made.pre), post=padded(made.post),
    )  # fmt: skip
    samples = [*world.samples[:2], longer, *world.samples[3:]]
    path = write_v1(tmp_path / "data", samples)
    with pytest.raises(HarnessError, match=r"padding[\s\S]*data_2.pt[\s\S]*5 of \d+ rows are zero"):
        states(world, path)
    found = states(world, path, Conventions(aux_layers=LAYERS, padding_rows="drop"))
    plain = states(world, write_v1(tmp_path / "plain", world.samples))
    assert found.lengths == plain.lengths
    for name in ("token_ids", "loss_mask", "aux", "final", "verifier_top1"):
        assert torch.equal(getattr(found[2], name), getattr(plain[2], name))
    marked = dataclasses.replace(longer, mask=torch.ones_like(longer.mask))
    path = write_v1(tmp_path / "marked", [*world.samples[:2], marked])
    with pytest.raises(HarnessError, match=r"without states are supervised[\s\S]*5 supervised"):
        states(world, path, Conventions(aux_layers=LAYERS, padding_rows="drop",
                                        mask_alignment="token"))  # fmt: skip


def test_folders_that_cannot_be_used(world: World, tmp_path: Path) -> None:
    assert open_foreign(tmp_path) is None
    path = write_v1(tmp_path / "two", world.samples)
    torch.save({}, path / "data_0.ckpt")
    with pytest.raises(HarnessError, match=r"two formats[\s\S]*8 files of speculators v1, 1 files"):
        open_foreign(path)
    path = write_v1(tmp_path / "version", world.samples)
    config = path / "data_config.json"
    config.write_text(config.read_text().replace('version": 1', 'version": 2'))
    with pytest.raises(HarnessError, match=r"not known[\s\S]*data_format_version 1[\s\S]*got: 2"):
        open_foreign(path)
    path = write_arrow(tmp_path / "alone", world.samples)
    for file in path.glob("*.arrow"):
        file.unlink()
    with pytest.raises(HarnessError, match="without the data set that they were made from"):
        opened(path).read(0)
    path = write_arrow(tmp_path / "mixed", world.samples)
    first, second = (path / "hidden_states" / f"hs_{i}.safetensors" for i in (0, 1))
    first.write_bytes(second.read_bytes())
    with pytest.raises(HarnessError, match=r"other tokens for the same sample[\s\S]*row 0"):
        opened(path).read(0)
    path = write_specforge(tmp_path / "odd", world.samples)
    file = path / "rows_0-5" / "data_0.ckpt"
    data = torch.load(file, weights_only=True)
    torch.save(data | {"aux_hidden_state": torch.zeros(1, 5, 100)}, file)
    with pytest.raises(HarnessError, match=r"whole number of hidden sizes[\s\S]*multiple of 64"):
        opened(path).read(0)


def test_files_that_do_not_go_together(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_v1(tmp_path / "twice", world.samples)
    (path / "data_01.pt").write_bytes((path / "data_1.pt").read_bytes())
    with pytest.raises(HarnessError, match=r"one number[\s\S]*data_01.pt and data_1.pt"):
        open_foreign(path)
    path = write_specforge(tmp_path / "rows", world.samples)
    (path / "rows_5-10" / "data_1.ckpt").write_bytes((path / "rows_0-5/data_1.ckpt").read_bytes())
    with pytest.raises(HarnessError, match=r"one number[\s\S]*rows_[\s\S]*data_1.ckpt and rows_"):
        open_foreign(path)
    path = write_arrow(tmp_path / "beyond", world.samples)
    states = path / "hidden_states"
    (states / "hs_77.safetensors").write_bytes((states / "hs_2.safetensors").read_bytes())
    with pytest.raises(HarnessError, match=r"does not have[\s\S]*its 8 rows[\s\S]*hs_77"):
        opened(path).read(8)
    path = write_v1(tmp_path / "fewer", world.samples)
    (path / "data_4.pt").unlink()
    open_foreign(path)
    assert any("7 files of samples, where data_config.json names 8" in m for m in caplog.messages)
    (path / "data_config.json").write_text("{torn")
    with pytest.raises(HarnessError, match=r"not a JSON file[\s\S]*or remove it: only its layer"):
        open_foreign(path)
    (path / "data_config.json").write_text('{"format": [1]}')
    with pytest.raises(HarnessError, match=r"not the data_config.json[\s\S]*format: an object"):
        open_foreign(path)


def test_an_arrow_file_that_is_damaged_is_named(world: World, tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "data", world.samples)
    file = path / "hidden_states" / "hs_1.safetensors"
    save_file({"token_ids": load_file(file)["token_ids"]}, file)
    with pytest.raises(HarnessError, match=r"lacks what its format holds[\s\S]*no hidden_states"):
        opened(path).read(1)
    file.write_bytes(b"torn")
    with pytest.raises(HarnessError, match=r"hs_1.safetensors[\s\S]*whole safetensors"):
        opened(path).read(1)
    none = {"hidden_states": torch.zeros(4, 0, 64), "token_ids": world.samples[1].ids}
    save_file(none, file)
    with pytest.raises(HarnessError, match=r"no states[\s\S]*hs_1.safetensors, hidden_states"):
        opened(path).read(1)
    (path / "state.json").write_text("{}")
    with pytest.raises(HarnessError, match=r"without the data set[\s\S]*got: KeyError"):
        opened(path).read(0)


def test_a_row_of_the_data_set_that_holds_no_numbers(world: World, tmp_path: Path) -> None:
    from datasets import Dataset

    path = write_arrow(tmp_path / "data", world.samples)
    for file in path.glob("*.arrow"):
        file.unlink()
    rows = [{"input_ids": sample.ids.tolist(), "loss_mask": None} for sample in world.samples]
    Dataset.from_list(rows).save_to_disk(str(path))
    with pytest.raises(HarnessError, match=r"row of the data set[\s\S]*row 1[\s\S]*prepare"):
        opened(path).read(1)
