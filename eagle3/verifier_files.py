"""A verifier's files: in a folder or on the hub, found one by one, linked, told apart.

Knows names and bytes, not what the files say.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from eagle3.errors import HarnessError
from eagle3.reading import read_object
from eagle3.workspace import digest

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE_FOLDER = "download or save the verifier again, whole"
NO_VERIFIER = "correct verifier.source, or the path; data/verifier comes from the verifier stage"
SINGLE = ("model.safetensors", "consolidated.safetensors", "pytorch_model.bin")


def optional_file(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import file_exists, hf_hub_download, try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(source, name), str):
        return Path(cached)
    return Path(hf_hub_download(source, name)) if file_exists(source, name) else None


def find_file(source: str, name: str) -> Path:
    """The path of a verifier's file, downloaded first where `source` is a hub id."""
    folder = Path(source)
    # "data/verifier" has the form of a hub id: where its parent is a folder here, a path is meant.
    local = folder.is_dir() or source.count("/") != 1 or folder.parent.is_dir()
    try:
        path = folder / name if local else optional_file(source, name)
    except Exception as error:
        raise HarnessError(
            f"the verifier's {name} is neither in a folder here nor to be had from the hub",
            where=source,
            rule="a Hugging Face model folder or hub id",
            got=error,
            fix=NO_VERIFIER,
        ) from None
    if path is None or not path.is_file():
        first = name == "config.json"
        raise HarnessError(
            f"the verifier's {name} is missing",
            where=source,
            rule="a Hugging Face model folder or hub id" + ("" if first else ", whole"),
            got="no such file",
            fix=NO_VERIFIER if first else WHOLE_FOLDER,
        )
    return path


def revision_of(source: str, config: Path) -> str:
    """The hub's commit; for a folder a fingerprint of the weight files.

    A fingerprint reads the first and last MiB of each file: enough to tell a verifier from a
    rounded or finetuned one, without reading a terabyte.
    """
    if not Path(source).is_dir():
        return config.parent.name
    parts = []
    folder = Path(source)
    for path in sorted(folder.glob(f"*{weight_kind(folder)}")):
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(1 << 20)
            file.seek(max(0, size - (1 << 20)))
            parts.append([path.name, size, start.hex(), file.read(1 << 20).hex()])
    return digest(parts)[:16]


def verifier_files(source: str) -> list[Path]:
    """All files of a verifier's folder that loading it may need; downloads a hub id's first."""
    if not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        find_file(source, "config.json")
        pickled = all(optional_file(source, name) is None for name in (INDICES[0], *SINGLE[:2]))
        unused = ["*.pth", "*.gguf", "*.safetensors" if pickled else "*.bin"]
        source = snapshot_download(source, ignore_patterns=unused)
    kinds = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", weight_kind(Path(source)))
    return [path for path in sorted(Path(source).iterdir()) if path.suffix in kinds]


def weight_kind(folder: Path) -> str:
    """Suffix of a folder's weight files: pickled ones are read where there are no others."""
    return ".safetensors" if any(folder.glob("*.safetensors")) else ".bin"


def link_verifier(source: str, out: Path) -> None:
    """Makes a folder of links to a verifier's files: weights of a terabyte are not copied.

    Raises:
        HarnessError: no verifier there.
    """
    find_file(source, "config.json")
    out.mkdir(parents=True, exist_ok=True)
    for path in verifier_files(source):
        link = out / path.name
        link.unlink(missing_ok=True)
        if path.suffix in (".safetensors", ".bin"):
            link.symlink_to(path.resolve())
        else:
            shutil.copyfile(path, link)
    config = read_object(out / "config.json")
    config.setdefault("_name_or_path", source if not Path(source).is_dir() else Path(source).name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
