"""The checks by subject; `shardplan.check` runs them in order."""
