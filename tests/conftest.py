import torch

torch.set_num_threads(1)  # the tests' tensors are small: threads cost more than they bring
