"""The run record: a directory that a stranger can read and check without vime."""
