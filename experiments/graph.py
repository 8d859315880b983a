"""What dvc.yaml's stages read and make, by path, with the arms of some settings.

DVC makes a stage of each arm for everything up to evaluation; what stands after it names the arms'
files one by one. Read without DVC, which takes a second to start.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from stages.params import read_yaml

ARM = "${key}"  # as dvc.yaml writes it


class Graph:
    """The stages of dvc.yaml.

    Attributes:
        root: the folder that paths count from.
        made: all outputs.
        read: by stage, the paths that it names; without those of the stages that DVC makes of arms.
    """

    def __init__(self, root: Path, arms: Collection[str]) -> None:
        self.root = root
        stages = read_yaml(root / "dvc.yaml")["stages"]
        outs = {str(out) for one in stages.values() for out in one.get("do", one).get("outs", [])}
        self.made = {out.replace(ARM, arm) for out in outs if ARM in out for arm in arms}
        self.made |= {out for out in outs if ARM not in out}
        self.read = {
            name: [str(dep) for dep in one.get("deps", [])] for name, one in stages.items()
        }
        self._arms = arms

    def makes(self, path: str) -> bool:
        """Whether a stage makes it, or a folder that it lies in."""
        return not self.made.isdisjoint({path, *map(str, Path(path).parents)})

    @property
    def uncompared(self) -> list[str]:
        """Arms that are trained and evaluated, but whose counts `compare` does not read."""
        read = self.read.get("compare")
        return [arm for arm in self._arms if read and f"metrics/{arm}.jsonl" not in read]
