"""SGLang 0.5.23: what of it is installed, and its command lines.

For states without a drafter, and for serving with and without one. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.engines.server import (
    Launch,
    Server,
    ServerSettings,
    ask,
    check_engine_version,
    engine_python,
    installed_version,
)
from eagle3.errors import HarnessError
from eagle3.verifier import VerifierSpec

NAME, VERSION = "sglang", "0.5.23"
ENVIRONMENT = ".venv-sglang"
PLUGIN, STAND_IN = "eagle3-sglang", "sgl-kernel-cpu-stand-in"
STATES_FOLDER = "EAGLE3_STATES_DIR"  # what the plugin reads
INFO = "/server_info"
WORKERS = "/workers"  # sglang-router's own
MARGIN = 16  # tokens of context beyond the longest document
# SGLang's attention on CPUs. `torch_native` reads the latent cache of MLA as keys and values, and
# every state from the first layer on is wrong; `intel_amx` knows it, and alone can draft.
NATIVE, AMX = "torch_native", "intel_amx"
CPU_SLOTS = 8192  # tokens of the cache on a CPU, where SGLang would take most of the memory


def sglang_python(settings: ServerSettings, device: str) -> Path:
    """The interpreter of SGLang's environment, checked without starting it.

    Raises:
        HarnessError: not installed, another version, our plugin is missing, or the kernels do not
            fit the device.
    """
    environment = Path(settings.environment or ENVIRONMENT)
    python = engine_python(environment, (NAME,), VERSION)
    if installed_version(environment, PLUGIN) is None:
        raise HarnessError(
            "SGLang's environment lacks this project's plugin", where=environment, rule=PLUGIN,
            fix="run `make engines`, or `pip install --no-deps eagle3/engines/sglang_plugin` there",
        )  # fmt: skip
    stand_in = installed_version(environment, STAND_IN) is not None
    if stand_in != device.startswith("cpu"):
        raise HarnessError(
            "SGLang's kernels do not fit the device", where=environment,
            rule="the real ones on a GPU, this project's stand-in on a CPU",
            got=f"{'the stand-in' if stand_in else 'no stand-in'} for {device}",
            fix="run `make engines` on this machine, or correct run.device",
        )  # fmt: skip
    return python


def states_launch(
    python: Path,
    spec: VerifierSpec,
    layer_ids: Sequence[int],
    *,
    dtype: str,
    device: str,
    batch_tokens: int,
    longest: int,
    folder: Path,
    log: Path,
    arguments: Sequence[str],
) -> Launch:
    """A server that captures states and drafts nothing.

    Args:
        layer_ids: SGLang's, see `eagle3.layer_ids`.
        batch_tokens: prompt tokens that it takes into one forward pass.
        longest: tokens of the longest document.
        folder: where the plugin writes.
    """
    capture = [
        "--disable-radix-cache", "--chunked-prefill-size", "-1",
        "--max-prefill-tokens", max(batch_tokens, longest),
        "--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states",
        "--return-aux-hidden-state-layer-ids", *layer_ids,
    ]  # fmt: skip
    if device.startswith("cpu"):
        # The narrower flags count before the first.
        capture += ["--attention-backend", NATIVE, *(_amx() if spec.latent_attention else [])]
    return _launch(
        python, spec, capture, dtype=dtype, device=device, longest=longest, log=log,
        arguments=arguments, environ={STATES_FOLDER: str(folder.absolute())},
    )  # fmt: skip


def serving_launch(
    python: Path,
    spec: VerifierSpec,
    drafter: Path | None,
    *,
    k: int,
    dtype: str,
    device: str,
    longest: int,
    log: Path,
    arguments: Sequence[str],
) -> Launch:
    """A server that answers, with a drafter that proposes chains of k tokens or without one."""
    # A prefix out of the cache would make one of two timings faster than the other.
    serving: list[object] = ["--disable-radix-cache"]
    if device.startswith("cpu"):
        # For plain decoding too, so that both compute alike.
        serving += _amx()
    if drafter is not None:
        serving += [
            "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter,
            "--speculative-num-steps", k, "--speculative-eagle-topk", 1,
            "--speculative-num-draft-tokens", k + 1,
        ]  # fmt: skip
    return _launch(
        python, spec, serving, dtype=dtype, device=device, longest=longest, log=log,
        arguments=arguments, environ={},
    )  # fmt: skip


def _amx() -> list[str]:
    return ["--prefill-attention-backend", AMX, "--decode-attention-backend", AMX]


def _launch(
    python: Path,
    spec: VerifierSpec,
    own: Sequence[object],
    *,
    dtype: str,
    device: str,
    longest: int,
    log: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> Launch:
    variables = dict(environ)
    common: list[object] = ["--model-path", spec.source, "--dtype", dtype]
    if spec.trust_remote_code:
        common.append("--trust-remote-code")
    if longest + MARGIN > spec.max_position_embeddings:
        common += ["--context-length", longest + MARGIN]
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if device.startswith("cpu"):
        common += [
            "--device", "cpu", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.2",
            "--max-total-tokens", max(CPU_SLOTS, 2 * (longest + MARGIN)),
            "--max-running-requests", 4, "--sleep-on-idle",
        ]  # fmt: skip
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}

    def command(host: str, port: int) -> list[str | Path]:
        address = ["--host", host, "--port", str(port)]
        flags = [str(part) for part in (*common, *own)]
        # The caller's own arguments come last: the last word counts.
        return [python, "-m", "sglang.launch_server", *address, *flags, *arguments]

    return Launch(engine=NAME, command=command, log=log, environ=variables)


def server_infos(server: Server) -> dict[str, dict[str, Any]]:
    """How a server was started, by its URL; behind sglang-router, each of those that it asks. Empty
    where none tells.

    Raises:
        HarnessError: another version of SGLang.
    """
    found = {server.url: _told(server.url, INFO)}
    if "version" not in found[server.url]:
        listed = _told(server.url, WORKERS).get("workers") or []
        found = {str(one["url"]): _told(str(one["url"]), INFO) for one in listed}
    found = {url: info for url, info in found.items() if "version" in info}
    for url, info in found.items():
        check_engine_version(info["version"], NAME, VERSION, url)
    return found


def _told(url: str, path: str) -> dict[str, Any]:
    try:
        answer = ask(url, path, seconds=30.0)
    except (OSError, ValueError, HarnessError):
        return {}
    return answer if isinstance(answer, dict) else {}


def check_attention(server: Server, spec: VerifierSpec) -> None:
    """Refuses a server whose attention would compute wrong states, and a wrong text of them.

    Raises:
        HarnessError: `torch_native` for a verifier with latent attention.
    """
    for url, info in server_infos(server).items():
        whole = info.get("attention_backend")
        found = {
            phase: info.get(f"{phase}_attention_backend") or whole
            for phase in ("prefill", "decode")
        }
        if spec.latent_attention and NATIVE in found.values():
            raise HarnessError(
                "the server would read the verifier's latent cache as keys and values",
                where=url, rule=f"another attention backend than {NATIVE} for MLA", got=found,
                fix=f"on a CPU: {' '.join(_amx())}; on a GPU leave both out",
            )  # fmt: skip
