"""Whether there is a CUDA device."""

import pytest
import torch

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
