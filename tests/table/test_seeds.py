"""The calls shown in the upstream documentation, verbatim."""

import warnings

import torch


def test_cublas_example():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # init_cublas warns if there is no CUDA

        from custom_mm import destroy_cublas, init_cublas
        from matmuls import cublasMM

        # create cublas handle (one-time overhead)
        init_cublas()

        a = torch.rand(8, 64)
        b = torch.rand(64, 8)

        # cublasMM is a torch.InplaceFunction with a forward and backward pass
        # You should use this when the gradient needs to be calculate
        c = cublasMM.apply(a, b)

        # destroy cublas handle
        destroy_cublas()
    torch.testing.assert_close(c, torch.matmul(a, b))


def test_attention_scores():
    import matmuls

    query_layer, key_layer = torch.rand(2, 4, 7, 16), torch.rand(2, 4, 7, 16)
    expected = torch.matmul(query_layer, key_layer.transpose(-1, -2))
    attention_scores = matmuls.cublasTransbMM.apply(query_layer, key_layer)
    torch.testing.assert_close(attention_scores, expected)


def test_square_matmul(device):
    from functools import reduce
    from operator import mul

    from torch import nn

    from matmuls import square_matmul, square_matmul_T

    a, b = torch.rand((512, 1024)).to(device), torch.rand((1024, 1024)).to(device)
    expected = a @ b
    square_matmul(a, b, 512, 1024)
    torch.testing.assert_close(a, expected)

    def inplace_linear(x: torch.Tensor, m: nn.Linear):
        x = x.contiguous()
        m.weight = m.weight.contiguous()
        square_matmul_T(x, m.weight, reduce(mul, x.shape[:-1]), x.shape[-1])
        if m.bias is not None:
            x += m.bias
        return x

    m, x = nn.Linear(64, 64).to(device), torch.rand(2, 8, 64).to(device)
    expected = m(x.clone())
    y = inplace_linear(x, m)
    assert y.data_ptr() == x.data_ptr()
    torch.testing.assert_close(y, expected)
    for ours, theirs in zip(*(torch.autograd.grad(t.sum(), m.parameters()) for t in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_inplace_softmax_and_layernorm(device):
    from functools import reduce
    from operator import mul

    from torch import nn

    from matmuls import inplace_softmax, inplace_softmax_backward
    from matmuls import layernorm as layernorm_C

    def layernorm(x: torch.Tensor, m: nn.LayerNorm) -> torch.Tensor:
        layernorm_C(x, reduce(mul, x.shape[:-1]), x.shape[-1])
        if m.weight is not None:
            x *= m.weight
        if m.bias is not None:
            x += m.bias
        return x

    a = torch.rand((512, 1024)).to(device)
    a = a.contiguous()
    expected = a.softmax(-1)
    inplace_softmax(a, 512, 1024)
    torch.testing.assert_close(a, expected)

    d_ov, values = torch.rand(512, 64).to(device), torch.rand(1024, 64).to(device)
    gradient = torch._softmax_backward_data(d_ov @ values.mT, a, -1, a.dtype)
    inplace_softmax_backward(a, d_ov, values, 512, 1024, 64)
    torch.testing.assert_close(a, gradient)

    m = nn.LayerNorm(64).to(device).requires_grad_(False)
    m.weight.uniform_()
    m.bias.uniform_()
    x = torch.rand(2, 8, 64).to(device)
    expected = m(x)
    torch.testing.assert_close(layernorm(x, m), expected)


def test_fused_softmax(device):
    from torch.autograd import Function

    import matmuls as transformer_softmax_lib

    class FusedSoftmax(Function):
        @staticmethod
        def forward(ctx, src, mask, scale_factor):
            output = transformer_softmax_lib.scaled_masked_softmax_forward(src, mask, scale_factor[0])
            ctx.save_for_backward(output, scale_factor)
            return output

        @staticmethod
        def backward(ctx, grad_output):
            src, scale_factor = ctx.saved_tensors
            grad_in = transformer_softmax_lib.scaled_masked_softmax_backward(grad_output, src, scale_factor[0])
            return grad_in, None, None

    for function in (FusedSoftmax, transformer_softmax_lib.FusedSoftmax):
        data_input = torch.randn([1, 8, 1024, 1024], dtype=torch.float16, device=device, requires_grad=True)
        data_input_check = data_input.clone().detach()
        data_input_check.requires_grad_(True)
        factor = torch.tensor([1.0], requires_grad=False)
        mask = torch.zeros([1, 1, 1024, 1024], dtype=torch.float16, device=device, requires_grad=False)
        check = torch.softmax(data_input_check, dim=-1)
        out_put = function.apply(data_input, mask, factor)

        # The document's tolerances would need bitwise equality for float16 above 0.01; these allow one rounding
        torch.testing.assert_close(check, out_put)

        with torch.autocast(device_type=device, dtype=torch.float16, enabled=False):
            out_put.sum().backward()
            check.sum().backward()
        assert torch.allclose(data_input.grad, data_input_check.grad, atol=1e-05, rtol=1e-05)


def test_fused_softmax_masks_and_scales(device):
    """In the documented formula a mask of any dtype masks where it is 1; the scale may be a number or a tensor."""
    from matmuls import FusedSoftmax, scaled_masked_softmax_backward, scaled_masked_softmax_forward

    x, grad = torch.randn(2, 3, 5, 7, device=device), torch.randn(2, 3, 5, 7, device=device)
    hidden = torch.rand(2, 1, 5, 7, device=device) > 0.5
    hidden[..., 0] = False
    leaf = x.clone().requires_grad_()
    expected = (leaf * 0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    (gradient,) = torch.autograd.grad(expected, leaf, grad)
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int64, torch.float32, torch.float16):
        mask = hidden.to(dtype)
        for scale in (0.5, torch.tensor(0.5), torch.tensor([0.5], device=device)):
            y = scaled_masked_softmax_forward(x, mask, scale)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(scaled_masked_softmax_backward(grad, y, scale), gradient)
            assert scaled_masked_softmax_backward(grad, y, scale, inplace=True) is y
            torch.testing.assert_close(y, gradient)
        ours = x.clone().requires_grad_()
        FusedSoftmax.apply(ours, mask, torch.tensor([0.5])).backward(grad)
        torch.testing.assert_close(ours.grad, gradient)
    unmasked = scaled_masked_softmax_forward(x, None, 0.5)
    torch.testing.assert_close(unmasked, (x * 0.5).softmax(-1))


def test_masked_linear_and_ffn(device):
    """The documented modules; the documented TritonLinear drops its result, which is returned here."""
    from torch import nn

    from matmuls import MaskedFFN, MaskedLinear

    class TorchLinear(nn.Module):
        def __init__(self, in_dim, out_dim):
            super().__init__()
            self.linear_v = nn.Linear(in_dim, out_dim, bias=False)
            self.linear_t = nn.Linear(in_dim, out_dim, bias=False)

        def forward(self, x, visual_mask):
            visual_mask = visual_mask[:, :, None]
            return self.linear_v(x) * visual_mask + self.linear_t(x) * (~visual_mask)

    class TritonLinear(TorchLinear):
        def forward(self, x, visual_mask):
            batch_size = x.shape[0]
            return MaskedLinear.apply(
                x.flatten(0, 1),
                self.linear_v.weight.data.T,
                self.linear_t.weight.data.T,
                visual_mask.flatten(),
            ).unflatten(0, (batch_size, -1))

    class Torch(nn.Module):
        def __init__(self, hidden_size, intermediate_size):
            super().__init__()
            self.w1 = nn.Linear(hidden_size, intermediate_size, bias=False)
            self.w2 = nn.Linear(intermediate_size, hidden_size, bias=False)
            self.w3 = nn.Linear(hidden_size, intermediate_size, bias=False)
            self.u1 = nn.Linear(hidden_size, intermediate_size, bias=False)
            self.u2 = nn.Linear(intermediate_size, hidden_size, bias=False)
            self.u3 = nn.Linear(hidden_size, intermediate_size, bias=False)

        @torch.no_grad()
        def forward(self, x, mask):
            mask = mask[:, :, None]
            proj1 = torch.nn.functional.silu(self.w1(x)) * self.w3(x)
            proj2 = torch.nn.functional.silu(self.u1(x)) * self.u3(x)
            return self.w2(proj1) * mask + self.u2(proj2) * ~mask

    class Triton(Torch):
        @torch.no_grad()
        def forward(self, x, mask):
            batch_size = x.shape[0]
            return MaskedFFN.apply(
                x.flatten(0, 1),
                self.w1.weight.data.T,
                self.w2.weight.data.T,
                self.w3.weight.data.T,
                self.u1.weight.data.T,
                self.u2.weight.data.T,
                self.u3.weight.data.T,
                mask.flatten(0, 1),
            ).unflatten(0, (batch_size, -1))

    x, mask = torch.randn(2, 33, 64, device=device), torch.rand(2, 33, device=device) < 0.5
    for stock, ours in ((TorchLinear(64, 48), TritonLinear(64, 48)), (Torch(64, 80), Triton(64, 80))):
        ours.load_state_dict(stock.state_dict())
        torch.testing.assert_close(ours.to(device)(x, mask), stock.to(device)(x, mask))

    w1, w2 = (torch.randn(64, 48, device=device, requires_grad=True) for _ in range(2))
    y = MaskedLinear.apply(x.flatten(0, 1), w1, w2, mask.flatten())
    expected = torch.where(mask.flatten()[:, None], x.flatten(0, 1) @ w1, x.flatten(0, 1) @ w2)
    wide = [t.detach().double().requires_grad_() for t in (w1, w2)]
    truth = torch.where(mask.flatten()[:, None], *(x.flatten(0, 1).double() @ w for w in wide))
    gradients = [
        torch.autograd.grad(z.square().sum(), w) for z, w in ((y, (w1, w2)), (expected, (w1, w2)), (truth, wide))
    ]
    for a, b, c in zip(*gradients, strict=True):
        error, torchs = ((z - c).norm().item() for z in (a, b))
        assert error <= 2 * torchs + torch.finfo(a.dtype).eps * c.norm().item()
