# Every target works on a machine with nothing but Python 3.11: the first one called builds .venv from the pinned
# requirements-dev.txt, the others find it ready.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Modules are compiled when they are first imported, a tenth of what is installed, and kept even where
# PYTHONDONTWRITEBYTECODE is set: else each process of the tests would compile torch anew.
INSTALL := install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# Test files run side by side in this many processes, each with test ranks of its own.
WORKERS ?= 2
# A test is repeated once, and counted as "rerun", where gloo could not connect the ranks' sockets: some sandboxes' networks
# drop a connection on loopback now and then. Nothing else is repeated.
# Tests run in random order, files and the tests of each: with SEED in the order of an earlier run.
ORDER := $(or $(SEED),$(shell od -An -N2 -tu2 /dev/urandom | tr -d ' '))
PYTEST := -m pytest -n $(WORKERS) --dist worksteal --reruns 1 --only-rerun "Gloo connectFullMesh failed" \
	--randomly-seed=$(ORDER)

export TOKENIZERS_PARALLELISM = false

# Other versions than the pinned ones, each in an environment of its own, .venvs/PACKAGE-VERSION, that takes the rest from
# .venv; and what else has to be older there.
MEGATRONS := megatron-core-0.14.0 megatron-core-0.15.3
# The Python part of Transformer Engine, without its kernels, in the version that the pinned Megatron-Core takes.
ENGINE := transformer_engine-2.11.0
WITH_transformer_engine-2.11.0 := onnx==1.23.2 onnxscript==0.7.2 onnx-ir==1.1.0 ml_dtypes==0.6.0 \
	importlib-metadata==10.2.0 zipp==4.1.2
# The one that Megatron-Core 0.19 and newer take, whose sources this is for.
ENGINE_OF_SOURCE := transformer_engine-2.20.2
WITH_$(ENGINE_OF_SOURCE) := $(WITH_$(ENGINE))
FROM_$(ENGINE_OF_SOURCE) = $(SOURCE)
TRANSFORMERS := transformers-4.51.3
WITH_transformers-4.51.3 := 'tokenizers<0.22' 'huggingface_hub<1'

.PHONY: help demo test test-all mutants test-nccl-rules test-versions test-torch test-source test-te-source test-te-units source-tree test-frameworks test-engines test-gpu check format plan plan-pipeline bench bench-gpu docs dist clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

# What a target wants to be told, asked before anything is made for it: the first of its prerequisites is `told-NAME`.
FRAMEWORKS = $(NEMO_RL_SRC)$(VERL_SRC)
ASK_FRAMEWORKS := which sources: NEMO_RL_SRC=TREE, VERL_SRC=TREE, or both
ASK_MEGATRON := which sources: MEGATRON=TREE, or CLONE@REF
ASK_TORCH := which torch: TORCH=2.15.0, or another version
ASK_TE := where Transformer Engine's sources are: TE=TREE
ASK_VLLM := where vLLM's source is: VLLM=TREE
told-%:
	@test -n "$($*)" || { echo "make $(MAKECMDGOALS): say $(ASK_$*)"; exit 2; }

# torch goes first: packages that depend on it must find the pinned build and not fetch another one.
$(VENV)/.ready: requirements-dev.txt setup.py
	@test ! -e $(VENV) -o -e $(VENV)/.ready -o -e $(VENV)/.made || \
		{ echo "$(VENV) was not made by make, which would empty it: call make with VENV=FOLDER, or remove it"; exit 2; }
	@echo "$(VENV) is made first: a minute or two, once. 1 of 4: an empty environment of $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $(VENV)/.made
	@echo "2 of 4: torch, the largest download"
	@$(PIP) $(INSTALL) $$(grep '^torch==' requirements-dev.txt)
	@echo "3 of 4: the $$(grep -c '==' requirements-dev.txt) packages of requirements-dev.txt: Megatron-Core, transformers, Ray and what they need"
	@$(PIP) $(INSTALL) -r requirements-dev.txt
	@echo "4 of 4: megatron_ext itself, as it lies here"
	@$(PIP) $(INSTALL) --no-build-isolation --no-deps -e .
	@echo "$(VENV) is ready"
	@touch $@

demo: $(VENV)/.ready  ## pretrain a real Megatron-Core GPT, stock and ours side by side; ends with a table and runs/demo/report.png
	$(PY) examples/demo.py $(ARGS)

# Tests of several ranks over the backend that hangs and refuses where NCCL does; eager: as with a device_id.
RULES ?= lazy
ON_NCCL_RULES = $(PY) $(PYTEST) -k "not world1" --nccl-rules
# What sends most, for `make test-all`; and eager, where messages run among collectives, what has both.
KEEP_NCCL_RULES := tests/distributed tests/tensor_parallel tests/sequence \
	$(addprefix tests/head/test_,linear.py disagreement.py fixed_bits.py) \
	$(addprefix tests/dtensor/test_,parity.py gradients.py parallelize.py) \
	$(addprefix tests/policy/test_,train.py checkpoint.py refit.py megatron_worker.py) \
	$(addprefix tests/megatron/test_,linear_ce_fsdp.py pretraining_parity.py) tests/experimental
KEEP_EAGER := tests/distributed tests/experimental

# What reads the sources alone, for `make check`.
LINTS := tests/test_layout.py tests/test_iteration_order.py tests/test_ratchets.py

test: $(VENV)/.ready .venvs/$(ENGINE)/.ready  ## the product's tests, on CPU, in random order: SEED=N repeats one
	$(PY) $(PYTEST) -m "not slow and not gpu and not aside" $(addprefix --ignore ,$(LINTS))
	$(ON_NCCL_RULES) lazy -m "several_ranks and not slow" tests/distributed tests/head/test_linear.py tests/tensor_parallel/test_mappings.py
	$(ON_ENGINE) -m "not slow and not aside"

test-all: $(VENV)/.ready .venvs/$(ENGINE)/.ready  ## all CPU tests, the slow matrices and the other versions too
	$(PY) $(PYTEST) -m "not gpu" $(addprefix --ignore ,$(LINTS))
	$(ON_NCCL_RULES) lazy -m "several_ranks and not slow and not gpu" $(KEEP_NCCL_RULES)
	$(ON_NCCL_RULES) eager -m "several_ranks and not slow and not gpu" $(KEEP_EAGER)
	$(ON_ENGINE)
	$(MAKE) test-versions

# Of COUNT lines of the package, one is changed at a time; ONLY="losses dtensor/plans.py" takes these folders and files.
# RECORDED=1 takes the last record of what each test runs, which takes minutes to make.
COUNT ?= 200
mutants: $(VENV)/.ready  ## are changes of single lines noticed? make mutants SEED=1 COUNT=200 ONLY=FOLDERS
	$(PY) -m tests.mutants --seed $(or $(SEED),1) --count $(COUNT) $(if $(RECORDED),--recorded) $(ONLY)

test-nccl-rules: $(VENV)/.ready  ## every test of several ranks over NCCL's rules, the slow ones too: RULES=lazy or eager
	$(ON_NCCL_RULES) $(RULES) -m "several_ranks and not gpu"

# Transformer Engine's tests have an environment of their own: without its kernels it cannot be imported, and Megatron
# imports whatever is there.
ON_ENGINE := .venvs/$(ENGINE)/bin/python $(PYTEST) tests/on_transformer_engine

# The environment's own packages come first; pip must not see the others, which are .venv's or those of FROM_: it would
# replace them.
.venvs/%/.ready: $(VENV)/.ready
	$(PY) -m venv --clear --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python $(INSTALL) --no-deps $(shell echo $* | sed 's/-\([^-]*\)$$/==\1/') $(WITH_$*)
	$(or $(FROM_$*),$(VENV))/bin/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/the_rest.pth
	@touch $@

# 0.14.0: Megatron's local attention has no sliding windows, with which this file compares ours, and its Megatron-FSDP
# fails with today's torch by itself.
WITHOUT_megatron-core-0.14.0 := --ignore tests/megatron/test_attention.py \
	--deselect "tests/megatron/test_linear_ce_fsdp.py::test_training_in_megatrons_wrappers[megatron"

# 4.51.3: use_fused_loss and the tables of classes want transformers 5, Trainer another accelerate than the pinned one, and
# masks have no functions of these names; its experts are lists of modules.
WITHOUT_transformers-4.51.3 := --ignore tests/dtensor/test_fused_loss.py --ignore tests/dtensor/test_fused_loss_proof.py \
	--ignore tests/dtensor/test_trainer.py --ignore tests/dtensor/test_any_class.py \
	--ignore tests/dtensor/test_pages.py --ignore tests/dtensor/test_adapted_heads.py \
	--deselect "tests/dtensor/test_parallelize.py::test_a_mask_of_the_same_name_is_not_transformers_own[world1]" \
	--deselect "tests/dtensor/test_gradients.py::test_a_rank_without_tokens_adds_nothing_to_its_experts[world2]" \
	$(addprefix --deselect tests/dtensor/test_bits_and_skip_ignored.py::test_, \
		products_are_of_the_tokens_that_count[_fused] bits_are_refused_where_the_models_logits_are_read[_fused])

# The quick tests, and of the slow ones those that may come out differently with another version.
OTHER_VERSIONS := "not gpu and (not slow or each_version)"

test-versions: $(MEGATRONS:%=.venvs/%/.ready) $(TRANSFORMERS:%=.venvs/%/.ready)  ## Megatron-Core 0.14.0 and 0.15.3, transformers 4.51.3
	set -e; $(foreach version,$(MEGATRONS),.venvs/$(version)/bin/python $(PYTEST) -m $(OTHER_VERSIONS) tests/megatron \
		$(WITHOUT_$(version));)
	set -e; $(foreach version,$(TRANSFORMERS),.venvs/$(version)/bin/python $(PYTEST) -m $(OTHER_VERSIONS) tests/dtensor \
		$(WITHOUT_$(version));)

# Another torch than the pinned one, with what it needs: gigabytes where it comes for CUDA. Triton's interpreter before 3.7
# does not work with numpy 2.4.
WITH_torch-2.10.0 := 'numpy<2.4'
.venvs/torch-%/.ready: $(VENV)/.ready
	$(PY) -m venv --clear --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python $(INSTALL) torch==$* $(WITH_torch-$*)
	$(PY) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/the_rest.pth
	@touch $@

test-torch: told-TORCH .venvs/torch-$(TORCH)/.ready  ## the quick tests with another torch: make test-torch TORCH=2.15.0
	.venvs/torch-$(TORCH)/bin/python $(PYTEST) -m "not slow and not gpu"

# Megatron-Core from source: an unpacked tree, or a git clone, CLONE@REF for one of its commits. The tests run on a copy,
# because Megatron's scripts compile a part of it; for that the environment has pybind11 and a python3-config of its own,
# and what only Megatron's tests import.
# From 0.18 on Megatron's training package wants typing.override, which Python 3.11 lacks. Last come Megatron's own unit
# tests, stock and ours: hours; UNITS="tensor_parallel models" takes these folders and files below tests/unit_tests alone.
SOURCE := .venvs/source
$(SOURCE)/.ready: $(VENV)/.ready
	$(PY) -m venv --clear --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python $(INSTALL) --no-deps pybind11==3.1.0 \
		pytest-asyncio==1.5.0 pytest-mock==3.17.0 mock==5.2.0 omegaconf==2.4.0 pyzmq==27.3.0 tensorboard==2.21.0 absl-py==2.5.1
	site=$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	$(PY) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$site/the_rest.pth; \
	echo 'import typing, typing_extensions; typing.override = typing_extensions.override' > $$site/typing_override.pth
	printf '#!/bin/sh\nexec "$(CURDIR)/$(@D)/bin/python" -c "import sysconfig; print(sysconfig.get_config_var(\\"EXT_SUFFIX\\"))"\n' \
		> $(@D)/bin/python3-config
	chmod +x $(@D)/bin/python3-config
	@touch $@

source-tree: told-MEGATRON $(SOURCE)/.ready
	rm -rf $(SOURCE)/tree; mkdir -p $(SOURCE)/tree
	set -e; if test -d "$(MEGATRON)"; then cd "$(MEGATRON)" && tar -c $$(ls -d megatron tests examples tools *.py *.toml 2>/dev/null); \
		else from="$(MEGATRON)"; git -C "$${from%@*}" archive "$${from##*@}"; fi | tar -x -C "$(CURDIR)/$(SOURCE)/tree"
	@test -d $(SOURCE)/tree/megatron/core || { echo "$(MEGATRON) holds no megatron/core"; exit 2; }

ON_SOURCE = PATH="$(CURDIR)/$(SOURCE)/bin:$$PATH" PYTHONPATH="$(CURDIR):$(CURDIR)/$(SOURCE)/tree"

test-source: source-tree  ## Megatron-Core from source: make test-source MEGATRON=TREE, or CLONE@REF
	$(ON_SOURCE) python $(PYTEST) -m "not gpu" tests/megatron tests/megatron_on_cpu/test_megatron.py \
		tests/tensor_parallel/test_gpt_parity.py tests/tensor_parallel/test_signatures.py
	$(SOURCE)/bin/python -W ignore -P tests/megatron/unit_suite.py $(SOURCE)/tree $(UNITS) \
		--results $(SOURCE)/tree/unit_suite.json

.venvs/$(ENGINE_OF_SOURCE)/.ready: $(SOURCE)/.ready

# The tests, then the column of the table in docs/transformer_engine.md for these sources, under the name COMMIT: 20 minutes.
test-te-source: source-tree .venvs/$(ENGINE_OF_SOURCE)/.ready  ## Transformer Engine 2.20 with it: make test-te-source MEGATRON=TREE COMMIT=NAME
	$(ON_SOURCE) .venvs/$(ENGINE_OF_SOURCE)/bin/python $(PYTEST) tests/on_transformer_engine
	$(ON_SOURCE) .venvs/$(ENGINE_OF_SOURCE)/bin/python -W ignore -m tests.megatron.matrix \
		--commit $(or $(COMMIT),$(notdir $(MEGATRON:%/=%)))

# Those of a list, which must pass: 2.11's sources, whose list is tests/on_transformer_engine/units_2.11.0.txt.
test-te-units: told-TE .venvs/$(ENGINE)/.ready  ## Transformer Engine's own unit tests on the stand-in: make test-te-units TE=TREE
	.venvs/$(ENGINE)/bin/python -W ignore -m tests.on_transformer_engine.units "$(TE)"

test-frameworks: told-FRAMEWORKS $(VENV)/.ready  ## RL frameworks from source: make test-frameworks NEMO_RL_SRC=TREE VERL_SRC=TREE
	$(if $(NEMO_RL_SRC),NEMO_RL_SRC="$(NEMO_RL_SRC)") $(if $(VERL_SRC),VERL_SRC="$(VERL_SRC)") \
		$(PY) -m pytest -m "not gpu" tests/integrations

# Kernels of inference engines beside the head's, under Triton's interpreter: about 2 minutes. Without MEGATRON the installed
# Megatron-Core's.
test-engines: told-VLLM $(VENV)/.ready  ## the head's bits beside vLLM's and Megatron's: make test-engines VLLM=TREE MEGATRON=TREE
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -W ignore -m tests.head.engine_bits "$(VLLM)" $(MEGATRON)

test-gpu: $(VENV)/.ready  ## the CUDA tests
	@$(PY) -c "import torch; assert torch.cuda.is_available()" 2>/dev/null || { \
		echo "torch sees no CUDA device, and these tests need one; '$(PY) -m pytest -m gpu --rehearse' runs most of" \
		"them on the CPU at toy sizes"; exit 2; }
	$(PY) -m pytest -m gpu

check: $(VENV)/.ready  ## lint, format, types, import direction
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest $(LINTS)

format: $(VENV)/.ready  ## let ruff fix what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

plan: $(VENV)/.ready  ## every launch of the head on an H200, with its estimate; needs no GPU
	$(PY) -m benchmarks.run plan

plan-pipeline: $(VENV)/.ready  ## a step of a pipeline that shares the vocabulary, simulated beside other schedules; needs no GPU
	$(PY) -m benchmarks.pipeline

bench: $(VENV)/.ready  ## the head beside Megatron's and others, on CPU; rows in benchmarks/results/
	$(PY) -m benchmarks.run cpu

bench-gpu: $(VENV)/.ready  ## the same at full size on one CUDA device, Liger and cut-cross-entropy too if installed
	$(PY) -m benchmarks.run gpu

# The site's tools read the sources without importing them, so their environment needs neither torch nor .venv.
.venvs/docs/.ready: requirements-docs.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check $(INSTALL) -r $<
	@touch $@

docs: .venvs/docs/.ready  ## the documentation site, in site/index.html; a broken link or reference fails
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/python -m mkdocs build --strict

# Wheel and sdist are built with the pinned setuptools, and tried where nothing but torch is installed.
.venvs/dist/.ready: requirements-dev.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check $(INSTALL) build==1.6.1 \
		$$(grep -E '^(setuptools|wheel)==' requirements-dev.txt)
	@touch $@

.venvs/torch-alone/.ready: requirements-dev.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check $(INSTALL) $$(grep '^torch==' requirements-dev.txt)
	@touch $@

dist: .venvs/dist/.ready .venvs/torch-alone/.ready  ## sdist and wheel in dist/, installed beside torch alone and tried
	rm -rf dist build
	.venvs/dist/bin/python -m build --no-isolation
	.venvs/torch-alone/bin/python -m pip --disable-pip-version-check $(INSTALL) --force-reinstall --no-deps dist/*.whl
	cd dist && ../.venvs/torch-alone/bin/python -P -m megatron_ext.doctor
	cd dist && ../.venvs/torch-alone/bin/python -P ../tests/installed_wheel.py

clean:  ## remove everything that the targets made
	rm -rf $(VENV) .venvs runs site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
