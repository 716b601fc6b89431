# The two main commands are `make fit` and `make test`. Both make .venv first.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

fit: $(VENV)/installed  ## install, then train the built-in run on two processes and make pictures
	$(RUN) -m gan.fit --strategy ddp

# Pictures that nobody here drew, of Debian's package fonts-noto-color-emoji.
KIMG := 266

people: $(VENV)/installed  ## on Debian: train StyleGAN2 on 684 emoji of people, for an hour (KIMG=40: ten minutes)
	$(RUN) samples/people.py data/people
	$(RUN) -m gan.fit stylegan2 --data data/people --size 32 --flip true --width 0.03 --gamma 1 --batch-size 16 \
		--kimg $(KIMG) --devices 1
	$(RUN) samples/gallery.py

test: $(VENV)/installed-test  ## install what tests need, then run unit tests, tests on several ranks, and commands
	$(RUN) -m tests

matrix: $(VENV)/installed-test  ## train every game under every policy, and write strategies/MATRIX.md
	$(RUN) -m pytest -q -m slow --ignore tests/matrix/test_crashes.py --ignore tests/ranks/test_crashes.py

crashes: $(VENV)/installed-test  ## kill ranks at random moments: 200 times with restarts, 50 times without
	$(RUN) -m pytest -q -s -m "slow or not slow" tests/ranks/test_crashes.py tests/matrix/test_crashes.py

faults: $(VENV)/installed-test  ## damage all that commands read, in 2,000 ways; ARGS='--seed N --case N' plays one again
	$(RUN) -m tests.faults $(ARGS)

mutants: $(VENV)/installed-test  ## put mistakes into the source, one at a time: a test must find each; ARGS='--only noise'
	$(RUN) -m tests.mutants $(ARGS)

# The published sizes of SEAN, and StyleGAN2 at 256 px.
SEAN := sean-faces --size 256 --upsamplings 5 --width 64 --hidden 128 --style 512 --batch-size 8
STYLEGAN := stylegan-faces --size 256 --width 64 --latent 512 --style 512 --mapping 8 --batch-size 16

# Tests of golden figures that were rehearsed on another device than the CPU.
GOLDEN := $(addprefix tests/unit/nets/test_,stylegan_golden.py r3.py biggan.py resnet.py lpips.py) \
	tests/unit/gan/games/test_pix2pix_options.py

gpu: $(VENV)/installed-test  ## on a machine with GPUs: golden figures, matrix, resumes, crashes, speed; writes GPU.md
	TESTS_ON=gpu $(RUN) -m pytest -q $(GOLDEN)
	TESTS_ON=gpu $(RUN) -m pytest -q -m "slow or not slow" tests/matrix/test_matrix.py
	TESTS_ON=gpu $(RUN) -m pytest -q -m "slow or not slow" tests/system/test_fit.py -k resumes_bit_for_bit
	TESTS_ON=gpu $(RUN) -m pytest -q -s -m slow tests/matrix/test_crashes.py -k "not restarts"
	$(RUN) -m gan.bench speed $(SEAN) --write strategies/GPU.md
	$(RUN) -m gan.bench speed $(STYLEGAN) --write strategies/GPU.md
	-$(RUN) -m gan.bench peers --device cuda

lint: $(VENV)/installed-test  ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyrefly check --python-interpreter-path $(RUN)

docs: $(VENV)/installed-docs  ## check the guides, and build them as a site in build/site
	$(RUN) docs/build.py

clean:  ## remove the environment; runs/ stays
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): 6 GB, which takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable . --constraint constraints.txt
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(RUN) -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(RUN) -m pip install --quiet --editable '.[docs]' --constraint constraints.txt
	touch $@

.PHONY: help fit people test matrix crashes faults mutants gpu lint docs clean
