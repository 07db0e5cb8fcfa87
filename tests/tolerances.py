"""Every tolerance of the suite, in fp32 on gloo. They are part of the contract: never relaxed to get green."""

LOGITS = 1e-5  # largest absolute difference
LOSS = 1e-6  # relative
LOSS_GRADIENT = 1e-5  # relative, of the gradient of sharded logits
GRADIENT = 1e-4  # |diff| <= GRADIENT |g| + GRADIENT_FLOOR |all gradients|, per tensor: some true gradients are ~1e-10
GRADIENT_FLOOR = 1e-7
NORM = 1e-5  # relative, of the gradient norm
PARAMETER = 1e-4  # |diff| <= PARAMETER |p| + PARAMETER_LR lr sqrt(numel), after AdamW steps
PARAMETER_LR = 0.01
OWN_NORM = 1e-6  # relative, of `get_grad_norm` against fp64 on the same gradients, in fp32 and bf16
BF16 = 1e-2  # relative: a norm that torch makes in bf16, losses under bf16 with fp32 reduction, gradients of autocast
TRAINING_LOSS = 1e-4  # relative, at each of 20 steps in fp32
TRAINING_NORM = 1e-3  # relative, of the gradient norm at each of these steps
