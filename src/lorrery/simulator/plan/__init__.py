"""How many workers a load needs: exact limits, a closed form, and simulations of what is near them."""
