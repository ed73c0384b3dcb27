"""The learner's side: publish weights and read batches over HTTP. Needs no Ray, no Kubernetes, no worker."""
