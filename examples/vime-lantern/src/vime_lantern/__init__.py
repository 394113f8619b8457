"""An example of a structure, its alignment contract and both of its sides, outside of vime."""
