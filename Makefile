.PHONY: demo test slow oldest check bench
demo test slow oldest check bench:
	@./run $@
