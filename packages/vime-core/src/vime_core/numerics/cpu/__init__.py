"""The provider ``cpu``: C++ for x86-64, one source, built on first use and cached."""
