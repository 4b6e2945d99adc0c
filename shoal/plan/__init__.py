"""What fits, how fast it would be, and why, before anything is rented: models of memory and time, and a search.

Nothing here imports torch. ``hardware`` and ``shape`` describe the machines and the model, ``work`` one way to spread
it; ``kernels`` and ``network`` price what one device and several do, ``clock`` runs a schedule's Program on those
prices, ``cost`` and ``memory`` put a whole step together, and ``search`` looks for the best.
"""
