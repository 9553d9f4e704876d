"""Tools for testing: the numpy oracle, test cases, and launchers.

    oracle        the semantics for all ranks at once, in plain loops
    cases         configurations, routings and payloads of the test matrix
    run           prepare, dispatch and combine under shard_map on stacked arrays
    compare       bitwise comparison with readable failures
    jaxprs        counting primitives
    multiprocess  N JAX processes on one machine
    gpus          all tests on the GPUs here, their ranks arranged in every way
"""
