"""Reference pages made from the code that they describe: `make docs` writes them, a test finds them stale."""
