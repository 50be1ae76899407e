"""The calls that the upstream documents show, word for word."""

import warnings

import torch


def test_cublas_example():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # init_cublas says so where there is no CUDA

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
