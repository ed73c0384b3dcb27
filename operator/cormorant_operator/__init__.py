"""The operator: creates the pods of CollectorJobs and keeps them in line with their specs."""
