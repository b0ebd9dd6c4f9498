"""The processes that run user code: the zygote and the workers it forks."""
