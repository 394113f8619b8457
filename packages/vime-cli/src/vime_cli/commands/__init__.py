"""One module a command. Heavy imports stay inside the functions, so that ``vime --help`` is quick."""
