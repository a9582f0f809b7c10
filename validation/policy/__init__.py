"""`lorrery validate policy`: whether a policy keeps the contract that the core relies on."""
