"""How engines cut a decoder's layers into products: attention, feed-forward, rules by architecture, quantisation."""
