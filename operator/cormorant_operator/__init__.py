"""The operator: makes pods of CollectorJobs and keeps them as the specs say."""
