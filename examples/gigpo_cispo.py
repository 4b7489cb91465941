"""GiGPO's advantages with CISPO's loss: an algorithm made of two.

    python gcd.py --algo examples/gigpo_cispo.py --step-weight 0.5

The loss comes first, so that it overrides; flags and `assign` are GiGPO's, and the defaults of both add up.
"""

from algorithms import cispo, gigpo


class Method(cispo.Loss, gigpo.Method):
    """GiGPO with CISPO's loss."""
