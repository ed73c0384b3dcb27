"""The Helm chart's values: the models they are checked by, and the files of charts/cormorant made from them."""
