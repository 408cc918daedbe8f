"""Elastic averaging (EASGD): each rank trains its own weights, pulled towards a centre.

strategy  the options and the steps
worker    a rank's messages to the servers that hold the centre
server    the centre's arithmetic, and the server that holds it or a range of it (no TensorFlow)
process   a separate process for the centre, next to the ranks that train (no TensorFlow)
"""
