"""First-party imports, found in the text of files."""

from __future__ import annotations

from pathlib import Path

from stages.closure import closure, code_of


def test_closure_follows_every_kind_of_import(tmp_path: Path) -> None:
    files = {
        "stages/train.py": "from eagle3 import trainer\ndef f():\n    import eagle3.lazy\n",
        "stages/__init__.py": "",
        "eagle3/__init__.py": "",
        "eagle3/trainer.py": (
            "import torch\nfrom typing import TYPE_CHECKING\nfrom eagle3.ttt import loss\n"
            "if TYPE_CHECKING:\n    from eagle3.decode import X\n"
        ),
        "eagle3/ttt.py": "from .formats.sglang import write",
        "eagle3/formats/__init__.py": "from . import npy",
        "eagle3/formats/sglang.py": "from ..errors import HarnessError",
        "eagle3/formats/npy.py": "",
        "eagle3/formats/page.html.j2": "",
        "eagle3/lazy.py": "",
        "eagle3/errors.py": "",
        "eagle3/decode.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {path.as_posix() for path in closure(tmp_path, "stages.train")}
    assert found == set(files) - {"eagle3/decode.py", "eagle3/formats/page.html.j2"}
    assert [path.as_posix() for path in code_of(tmp_path, "stages.train")] == [
        "eagle3/formats/__init__.py",
        "eagle3/formats/npy.py",
        "eagle3/formats/page.html.j2",
        "eagle3/formats/sglang.py",
        "eagle3/lazy.py",
        "eagle3/trainer.py",
        "eagle3/ttt.py",
        "stages/train.py",
    ]
