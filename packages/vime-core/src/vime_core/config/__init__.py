"""Configuration: frozen schema, TOML files overlaid left to right, and errors that name the nearest key."""
