"""`eagle3 export`: any drafter checkpoint in the layout that an engine reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

from eagle3.checkpoint import CONFIG, WEIGHTS
from eagle3.errors import HarnessError
from eagle3.export import ExportSettings, export
from eagle3.reading import read_object
from eagle3.settings import read_settings
from eagle3.verifier_files import find_file
from eagle3.workspace import publish
from experiments.output_folder import check_output
from experiments.verifier_argument import head_of


def run(*, checkpoint: Path, out: Path, verifier_path: str, layout: str) -> None:
    """Writes the checkpoint anew and says how far its logits moved.

    Raises:
        HarnessError: a drafter that engines do not run, of another verifier, or a folder in the
            way. Nothing is written then.
    """
    settings = read_settings(ExportSettings, {"format": layout}, where="flags")
    check_output(out, "OUT", {WEIGHTS, CONFIG})
    if out.resolve() == checkpoint.resolve():
        raise HarnessError(
            "the export would replace the checkpoint that it is made from", where=out,
            rule="another folder", fix="name another folder",
        )  # fmt: skip
    head = head_of(verifier_path)
    source: str | None = None
    architectures: list[str] = []
    if not Path(verifier_path).is_file():
        source = verifier_path
        architectures = read_object(find_file(source, "config.json")).get("architectures") or []
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
        error = export(
            checkpoint, Path(work) / "export", head, settings.format,
            source=source, architectures=architectures,
        )  # fmt: skip
        publish(Path(work) / "export", out)
    print(
        f"{out}: {settings.format} layout, bfloat16; largest relative logit difference {error:.2g}"
    )
