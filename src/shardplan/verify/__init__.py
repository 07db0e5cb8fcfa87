"""The numeric proof: a shrunk model, sharded on local processes, against the unsharded one."""
