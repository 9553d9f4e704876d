"""How custom calls get onto the stream of XLA's collectives, beside the stream that computes."""

from collections.abc import Callable, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo
from jax.interpreters import mlir

# What jax.experimental.compute_on("gpu_stream:collective") attaches to the call of a region. XLA
# makes a start and a done of such a call, as of its own collectives, and schedules what does not
# depend on it between the two. A custom call without it is a part of the stream that computes.
_ATTRIBUTES = {"_xla_stream_annotation": "collective", "inlineable": "false"}


def on_collective_stream(
    ctx: mlir.LoweringRuleContext, name: str, lower: Callable, operands: Sequence[ir.Value]
) -> Sequence[ir.Value]:
    """Lowers an operation to a call that XLA runs asynchronously on the stream of collectives.

    Args:
      ctx: of the primitive's lowering rule.
      name: of the function that is called; made unique.
      lower: takes the operands as the function has them, and gives the operation's results.
      operands: of the operation.

    Returns:
      The operation's results.
    """
    types = [operand.type for operand in operands]
    top = ir.InsertionPoint.at_block_begin(ctx.module_context.module.body)
    body = func.FuncOp(name, (types, []), visibility="private", ip=top)
    ctx.module_context.symbol_table.insert(body)  # which makes the name unique
    with ir.InsertionPoint(body.add_entry_block()):
        results = list(lower(*body.entry_block.arguments))
        func.ReturnOp(results)
    signature = ir.FunctionType.get(types, [result.type for result in results])
    body.attributes["function_type"] = ir.TypeAttr.get(signature)
    # XLA would move constants into the function, and jax 0.12.0.1 names them there as PTX cannot.
    operands = list(stablehlo.OptimizationBarrierOp(operands).results)
    call = func.CallOp(body, operands)
    call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {key: ir.StringAttr.get(value) for key, value in _ATTRIBUTES.items()})
    if len(call.results) == 1:
        return call.results
    # XLA takes results out of a call by instructions that inherit its attributes, makes
    # asynchronous pairs of these, too, and hides compute behind them instead of the call. A barrier
    # takes all results at once, and is gone when the program runs.
    return stablehlo.OptimizationBarrierOp(call.results).results
