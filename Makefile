# Every target makes the environment first, if it is not there. PYTHON: what makes it; VENV: where it lies.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
quoted = '$(subst ','\'',$(1))'# for the shell: paths may have spaces

.PHONY: help demo test test-rest test-known test-all test-gpu test-mutants test-transformers test-versions test-multigpu test-sanitizer build wheel \
	stage upload hub check clean bench-all bench-ops bench-liger bench-rmsnorm bench-lce bench-8b bench-8b-seq bench-qwen3 bench-lora \
	bench-trainers bench-qwen3-moe bench-gpt-oss bench-fsdp bench-generate bench-adamw bench-host bench-plots

help: ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'
	$(BIN)/python -m pip install --progress-bar on 'torch==2.13.0' --quiet
	$(BIN)/python -m pip install --progress-bar on --quiet --editable '.[dev]'
	touch $@

demo: $(READY) ## build, publish to a local Hub, load back, and fine-tune a Qwen3 with and without Bastile (MODEL=path for your own)
	$(BIN)/python -m tools.compile --here --package .
	$(BIN)/python -m tools.assemble --package .
	$(BIN)/python -m tools.demo $(if $(MODEL),--model $(call quoted,$(MODEL)))

# One process a core with one thread each: the tests are many and small, and threads that outnumber the cores wait for each other.
test: $(READY) ## what a change needs, without a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cpu interpreter/tests -n auto --dist worksteal -m 'not whole and not known'

test-rest: $(READY) ## what `make test` leaves out (tests/whole.py)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cpu interpreter/tests -n auto --dist worksteal -m 'whole and not known'

test-known: $(READY) ## the tests of what lies below hf/ again, which are left out while their files are those that they passed with, and record them
	$(BIN)/python -m tests.settled

test-all: test test-rest test-known ## everything that needs no GPU

test-mutants: $(READY) ## plant an error in every mask, scale and saved tensor, count those that the tests catch, and record it
	$(BIN)/python -m tests.verdicts --all

test-gpu: $(READY) build ## the numerics with the real cubins, on this machine's GPU
	$(BIN)/python -m pytest tests/gpu

test-versions: $(READY) ## the tests of patching, layers, training and saving with the oldest and the newest libraries (ENVIRONMENTS=newest for one)
	$(BIN)/python -m tests.environments $(if $(FEWER),--fewer) $(ENVIRONMENTS)

test-transformers: $(READY) ## transformers' own tests with the packages in force and without (TESTS=path of a checkout at the installed version; SHORT=1 for an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.upstream $(if $(TESTS),$(call quoted,$(TESTS))) $(if $(SHORT),--short)

test-multigpu: $(READY) build ## parallel training and device_map on two GPUs
	$(BIN)/python -m pytest tests/multigpu

test-sanitizer: $(READY) build ## compute-sanitizer's memcheck, racecheck and initcheck over the operations' GPU tests
	$(BIN)/python -m tests.sanitizer --record

build: $(READY) ## compile the kernels of every package for every architecture and assemble their build/
	$(BIN)/python -m tools.compile
	$(BIN)/python -m tools.assemble

wheel: $(READY) ## the package for pip, with every family and its kernels, under dist
	$(BIN)/python -m tools.compile --wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

stage: build ## write each package as one self-contained tree for kernel-builder, under build/stage
	$(BIN)/python -m tools.stage

upload: build ## publish every package's build/ to the Hub (HF_TOKEN, or hf auth login)
	$(BIN)/python -m tools.publish

hub: $(READY) ## a local Hub on http://127.0.0.1:8765
	$(BIN)/python -m tools.hub --port 8765

bench-all: $(READY) ## every run that the tables need, in the order of their weight (RUNS=steps,lora for some, BUDGET=540 for 9 minutes)
	$(BIN)/python -m benchmark.all $(if $(RUNS),--runs $(call quoted,$(RUNS))) $(if $(BUDGET),--budget-s $(BUDGET))

bench-ops: $(READY) ## every operation against its peers and the floor (needs a GPU, about 5 minutes)
	$(BIN)/python -m benchmark --budget-s 300

bench-liger: $(READY) ## Liger's operations at the sizes whose limits are declared (about 5 minutes)
	$(BIN)/python -m benchmark.limits --budget-s 280

bench-rmsnorm: $(READY) ## RMSNorm alone
	$(BIN)/python -m benchmark.benchmark_rms_norm

bench-lce: $(READY) ## linear + cross entropy alone
	$(BIN)/python -m benchmark.benchmark_linear_cross_entropy

bench-qwen3: $(READY) ## whole training steps of Qwen3-8B (needs a 141 GB GPU; --model for smaller ones)
	$(BIN)/python -m benchmark.benchmark_qwen3 --rounds 3 --budget-s 560

bench-8b: $(READY) ## the same at every length, a length on each GPU that is there
	$(BIN)/python -m benchmark.sweep --rounds 3

bench-8b-seq: bench-qwen3 ## the same on one GPU, one length after the other

bench-lora: $(READY) ## training steps of LoRA, and under autocast over bf16 and fp32 weights
	$(BIN)/python -m benchmark.benchmark_lora
	$(BIN)/python -m benchmark.steps --autocast --layers 12 --tokens 512,4096
	$(BIN)/python -m benchmark.steps --autocast --weights fp32 --layers 12 --tokens 4096

bench-trainers: $(READY) ## TRL's SFTTrainer over texts of uneven length, padded and packed, with LoRA and of all weights, compiled too; and DPOTrainer
	$(BIN)/python -m benchmark.all --runs sft_padded,sft_padded_captured,sft_packed,sft_full_padded,sft_full_packed
	$(BIN)/python -m benchmark.all --runs dpo_huggingface,dpo_liger,dpo_bastile,dpo_bastile_captured,sft_torch_compile,sft_bastile_compiled

bench-qwen3-moe: $(READY) ## Qwen3-30B-A3B: the layer of experts, and training steps of 12 layers (needs a 141 GB GPU)
	$(BIN)/python -m benchmark.benchmark_qwen3_experts --budget-s 300
	$(BIN)/python -m benchmark.steps --model qwen3_moe_30b_a3b --rounds 3 --budget-s 560

bench-gpt-oss: $(READY) ## GPT-OSS: the layer of experts, 32 and 128 of them, and training steps of 12 layers (needs a 141 GB GPU)
	$(BIN)/python -m benchmark.benchmark_experts --budget-s 300
	$(BIN)/python -m benchmark.benchmark_experts --model gpt_oss_120b --tokens 2048,8192 --budget-s 300
	$(BIN)/python -m benchmark.steps --model gpt_oss_20b --rounds 3 --budget-s 560

bench-fsdp: $(READY) ## training steps sharded over two GPUs
	$(BIN)/python -m benchmark.benchmark_fsdp --gpus 2
	$(BIN)/python -m benchmark.benchmark_fsdp --model gpt_oss_20b --gpus 2

bench-adamw: $(READY) ## the optimizer's step
	$(BIN)/python -m benchmark.benchmark_adamw

bench-host: $(READY) ## what the host needs: a norm, a decoder layer, an optimizer's step (without a GPU: with a driver that does nothing)
	$(BIN)/python -m benchmark.benchmark_host

bench-generate: $(READY) ## prefill and one-token steps of generate()
	$(BIN)/python -m benchmark.benchmark_generate

bench-plots: $(READY) ## pictures, and README, docs and cards with numbers, from benchmark/results and *.md.j2
	$(BIN)/python -m benchmark.plots
	$(BIN)/python -m benchmark.tables --write

check: $(READY) ## style and types
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.prose

clean:
	rm -rf build dist packages/*/build .cache torch-ext/*/cubins packages/*/torch-ext/*/cubins
