"""From a network to <g_q, G^-1 g_i>: gradient factors, their curvature, and the kernel; pure maths
apart from the hooks.
"""
