CREATE TABLE schema_version (version INTEGER NOT NULL);
CREATE TABLE groups (
    seq INTEGER NOT NULL, group_id TEXT NOT NULL, env TEXT NOT NULL, format TEXT NOT NULL,
    size BIGINT NOT NULL, tokens BIGINT NOT NULL, max_length BIGINT NOT NULL,
    policy_version BIGINT NOT NULL, env_id BIGINT, state TEXT NOT NULL, lease_id TEXT,
    created_at DOUBLE NOT NULL, PRIMARY KEY (seq), UNIQUE (group_id),
    CONSTRAINT known_state CHECK (state IN ('buffered', 'queued', 'leased', 'acked', 'dropped'))
);
CREATE INDEX groups_buffered ON groups (seq) WHERE state = 'buffered';
CREATE INDEX groups_queued ON groups (seq) WHERE state = 'queued';
CREATE TABLE bodies (
    seq INTEGER NOT NULL, encoding SMALLINT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (seq),
    FOREIGN KEY(seq) REFERENCES groups (seq)
);
CREATE TABLE leases (
    lease_id TEXT NOT NULL, run TEXT NOT NULL, group_ids TEXT NOT NULL, created_at DOUBLE NOT NULL,
    expires_at DOUBLE NOT NULL, state TEXT NOT NULL, PRIMARY KEY (lease_id),
    CONSTRAINT known_state CHECK (state IN ('open', 'expired', 'acked', 'nacked'))
);
CREATE INDEX leases_open ON leases (expires_at) WHERE state = 'open';
CREATE TABLE runs (
    name TEXT NOT NULL, created_at DOUBLE NOT NULL, batch_size BIGINT NOT NULL,
    settings TEXT NOT NULL, policy_version BIGINT NOT NULL, state TEXT NOT NULL,
    PRIMARY KEY (name), CONSTRAINT known_state CHECK (state IN ('open', 'closed'))
);
CREATE TABLE "values" ("key" TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY ("key"));
INSERT INTO schema_version VALUES (1);
INSERT INTO runs VALUES ('trainer', 900, 4, '{"max_length":5}', 7, 'open'),
    ('done', 901, 1, '{}', -1, 'closed');
INSERT INTO "values" VALUES ('registration', '{"uuid":1}');
