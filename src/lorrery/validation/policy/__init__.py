"""`lorrery validate policy`: checks that a policy keeps the contract that the core relies on."""
