"""How a run is told: on the terminal, and as JSON lines. Reports see events, and nothing behind them."""
