// The headers that most operators include, which setup.py compiles once for all of them.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "glue/autograd.h"
#include "glue/autograd_inplace.h"
#include "glue/checks.h"
#include "glue/operator.h"
