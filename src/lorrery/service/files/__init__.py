"""Files: those that ship, tables as TOML and CSV, whole or not at all, and read again when they change."""
