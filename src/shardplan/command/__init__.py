"""What ``plan-compile`` does, one module for each thing that it can be asked for."""
