.PHONY: demo test slow check bench
demo test slow check bench:
	@./run $@
