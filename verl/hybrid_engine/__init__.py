"""From the weights that train to the weights that sample: versions, and checks that they are the same."""
