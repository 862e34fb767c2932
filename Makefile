.PHONY: test test-all docs bench

test:  # what a change can have broken
	scripts/test.sh

test-all:  # everything
	scripts/test.sh --all

docs:  # the site, at http://127.0.0.1:8000
	scripts/environment.sh
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs serve

bench:  # all operations beside their competitors, on the GPUs that are there
	scripts/environment.sh
	.venv/bin/flux-megatron bench
