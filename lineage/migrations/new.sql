CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('datastates_0001');
CREATE TABLE attribute (
	state_id INTEGER NOT NULL, 
	"key" VARCHAR(255) NOT NULL, 
	type VARCHAR(5) NOT NULL, 
	number DOUBLE, 
	text TEXT, 
	CONSTRAINT pk_attribute PRIMARY KEY (state_id, "key"), 
	CONSTRAINT fk_attribute_state_id_state FOREIGN KEY(state_id) REFERENCES state (id)
)
 WITHOUT ROWID

;
CREATE TABLE clone (
	id INTEGER NOT NULL, 
	state_id INTEGER NOT NULL, 
	source TEXT NOT NULL, 
	source_repository VARCHAR(255) NOT NULL, 
	node VARCHAR(255) NOT NULL, 
	run_id INTEGER, 
	bytes_moved BIGINT NOT NULL, 
	created_at BIGINT NOT NULL, 
	CONSTRAINT pk_clone PRIMARY KEY (id), 
	CONSTRAINT fk_clone_state_id_state FOREIGN KEY(state_id) REFERENCES state (id), 
	CONSTRAINT fk_clone_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
);
CREATE TABLE edge (
	child_id INTEGER NOT NULL, 
	parent_id INTEGER NOT NULL, 
	kind VARCHAR(12) NOT NULL, 
	position INTEGER NOT NULL, 
	weight DOUBLE NOT NULL, 
	CONSTRAINT pk_edge PRIMARY KEY (child_id, parent_id, kind), 
	CONSTRAINT fk_edge_child_id_state FOREIGN KEY(child_id) REFERENCES state (id), 
	CONSTRAINT fk_edge_parent_id_state FOREIGN KEY(parent_id) REFERENCES state (id)
)
 WITHOUT ROWID

;
CREATE TABLE folder (
	uid VARCHAR(24) NOT NULL, 
	path TEXT NOT NULL, 
	host TEXT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	CONSTRAINT pk_folder PRIMARY KEY (uid)
);
CREATE TABLE metric (
	state_id INTEGER NOT NULL, 
	"key" VARCHAR(255) NOT NULL, 
	value DOUBLE, 
	CONSTRAINT pk_metric PRIMARY KEY (state_id, "key"), 
	CONSTRAINT fk_metric_state_id_state FOREIGN KEY(state_id) REFERENCES state (id)
)
 WITHOUT ROWID

;
CREATE TABLE note (
	id INTEGER NOT NULL, 
	uid VARCHAR(24) NOT NULL, 
	state_id INTEGER, 
	branch VARCHAR(255), 
	author VARCHAR(255) NOT NULL, 
	text TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	edited_at BIGINT, 
	CONSTRAINT pk_note PRIMARY KEY (id), 
	CONSTRAINT fk_note_state_id_state FOREIGN KEY(state_id) REFERENCES state (id), 
	CONSTRAINT uq_note_uid UNIQUE (uid)
);
CREATE TABLE part (
	state_uid VARCHAR(24) NOT NULL, 
	rank INTEGER NOT NULL, 
	world_size INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	run_id INTEGER, 
	status VARCHAR(12) NOT NULL, 
	tier VARCHAR(12) NOT NULL, 
	node VARCHAR(255) NOT NULL, 
	bytes_total BIGINT NOT NULL, 
	bytes_new BIGINT NOT NULL, 
	told_at BIGINT NOT NULL, 
	place TEXT, 
	said TEXT, 
	CONSTRAINT pk_part PRIMARY KEY (state_uid, rank), 
	CONSTRAINT fk_part_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
)
 WITHOUT ROWID

;
CREATE TABLE ref (
	name VARCHAR(255) NOT NULL, 
	kind VARCHAR(6) NOT NULL, 
	state_id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	message TEXT, 
	CONSTRAINT pk_ref PRIMARY KEY (name), 
	CONSTRAINT fk_ref_state_id_state FOREIGN KEY(state_id) REFERENCES state (id)
);
CREATE TABLE ref_event (
	id INTEGER NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	kind VARCHAR(6) NOT NULL, 
	old_id INTEGER, 
	new_id INTEGER, 
	reason TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	CONSTRAINT pk_ref_event PRIMARY KEY (id), 
	CONSTRAINT fk_ref_event_new_id_state FOREIGN KEY(new_id) REFERENCES state (id), 
	CONSTRAINT fk_ref_event_old_id_state FOREIGN KEY(old_id) REFERENCES state (id)
);
CREATE TABLE replica (
	state_id INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	tier VARCHAR(12) NOT NULL, 
	node VARCHAR(255) NOT NULL, 
	status VARCHAR(8) NOT NULL, 
	bytes BIGINT NOT NULL, 
	is_near BOOLEAN, 
	CONSTRAINT pk_replica PRIMARY KEY (state_id, rank, tier, node), 
	CONSTRAINT fk_replica_state_id_state FOREIGN KEY(state_id) REFERENCES state (id)
)
 WITHOUT ROWID

;
CREATE TABLE report (
	id INTEGER NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	created_at BIGINT NOT NULL, 
	body TEXT NOT NULL, 
	CONSTRAINT pk_report PRIMARY KEY (id), 
	CONSTRAINT uq_report_name UNIQUE (name)
);
CREATE TABLE report_sample (
	report_id INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	sample BIGINT NOT NULL, 
	body TEXT NOT NULL, 
	picture BLOB, 
	CONSTRAINT pk_report_sample PRIMARY KEY (report_id, rank), 
	CONSTRAINT fk_report_sample_report_id_report FOREIGN KEY(report_id) REFERENCES report (id)
);
CREATE TABLE repository (
	id INTEGER NOT NULL, 
	uid VARCHAR(24) NOT NULL, 
	CONSTRAINT pk_repository PRIMARY KEY (id)
);
INSERT INTO "repository" VALUES(1,'');
CREATE TABLE run (
	id INTEGER NOT NULL, 
	uid VARCHAR(24) NOT NULL, 
	host TEXT NOT NULL, 
	user TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	argv JSON NOT NULL, 
	git_commit TEXT, 
	git_dirty BOOLEAN, 
	config JSON NOT NULL, 
	versions JSON NOT NULL, 
	started_at BIGINT NOT NULL, 
	finished_at BIGINT, 
	process VARCHAR(24), 
	branch VARCHAR(255), 
	is_carried BOOLEAN, 
	CONSTRAINT pk_run PRIMARY KEY (id), 
	CONSTRAINT uq_run_uid UNIQUE (uid)
);
CREATE TABLE seal (
	state_id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_seal PRIMARY KEY (state_id), 
	CONSTRAINT fk_seal_state_id_state FOREIGN KEY(state_id) REFERENCES state (id)
);
CREATE TABLE segment (
	id INTEGER NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	branch VARCHAR(255), 
	fork_id BIGINT, 
	first_id BIGINT, 
	CONSTRAINT pk_segment PRIMARY KEY (id), 
	CONSTRAINT uq_segment_branch UNIQUE (branch)
);
CREATE TABLE setting (
	run_id INTEGER NOT NULL, 
	"key" VARCHAR(255) NOT NULL, 
	type VARCHAR(5) NOT NULL, 
	number DOUBLE, 
	text TEXT, 
	CONSTRAINT pk_setting PRIMARY KEY (run_id, "key"), 
	CONSTRAINT fk_setting_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
)
 WITHOUT ROWID

;
CREATE TABLE state (
	id INTEGER NOT NULL, 
	uid VARCHAR(24) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	parent_id INTEGER, 
	generation INTEGER NOT NULL, 
	jump_id INTEGER, 
	jump_step BIGINT, 
	run_id INTEGER, 
	step BIGINT NOT NULL, 
	micro_step INTEGER NOT NULL, 
	created_at BIGINT NOT NULL, 
	status VARCHAR(12) NOT NULL, 
	bytes_total BIGINT NOT NULL, 
	bytes_new BIGINT NOT NULL, 
	world_size INTEGER NOT NULL, 
	message TEXT, 
	segment_id BIGINT, 
	CONSTRAINT pk_state PRIMARY KEY (id), 
	CONSTRAINT fk_state_jump_id_state FOREIGN KEY(jump_id) REFERENCES state (id), 
	CONSTRAINT fk_state_parent_id_state FOREIGN KEY(parent_id) REFERENCES state (id), 
	CONSTRAINT fk_state_run_id_run FOREIGN KEY(run_id) REFERENCES run (id), 
	CONSTRAINT uq_state_uid UNIQUE (uid)
);
CREATE TABLE stretch (
	segment_id INTEGER NOT NULL, 
	"key" VARCHAR(255) NOT NULL, 
	place INTEGER NOT NULL, 
	count INTEGER NOT NULL, 
	gaps INTEGER NOT NULL, 
	total DOUBLE NOT NULL, 
	least DOUBLE, 
	least_id BIGINT, 
	most DOUBLE, 
	most_id BIGINT, 
	first DOUBLE, 
	first_id BIGINT, 
	last DOUBLE, 
	last_id BIGINT, 
	gap_id BIGINT, 
	CONSTRAINT pk_stretch PRIMARY KEY (segment_id, "key", place), 
	CONSTRAINT fk_stretch_segment_id_segment FOREIGN KEY(segment_id) REFERENCES segment (id)
)
 WITHOUT ROWID

;
CREATE TABLE variant (
	study VARCHAR(255) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	place INTEGER NOT NULL, 
	parent VARCHAR(255), 
	epochs BIGINT NOT NULL, 
	config TEXT NOT NULL, 
	planned_at BIGINT NOT NULL, 
	began_at BIGINT, 
	ended_at BIGINT, 
	attempts INTEGER NOT NULL, 
	took_s DOUBLE NOT NULL, 
	error TEXT, 
	CONSTRAINT pk_variant PRIMARY KEY (study, name)
)
 WITHOUT ROWID

;
CREATE INDEX ix_run_process ON run (process);
CREATE INDEX ix_part_run_id ON part (run_id);
CREATE INDEX ix_setting_key_setting_number_setting_run_id ON setting ("key", number, run_id);
CREATE INDEX ix_state_created_at ON state (created_at);
CREATE INDEX ix_state_digest ON state (digest);
CREATE INDEX ix_state_parent_id ON state (parent_id);
CREATE INDEX ix_state_run_id ON state (run_id);
CREATE INDEX ix_state_segment_id_state_status_state_bytes_new ON state (segment_id, status, bytes_new);
CREATE INDEX ix_state_step ON state (step);
CREATE INDEX ix_attribute_key_attribute_number_attribute_state_id ON attribute ("key", number, state_id);
CREATE INDEX ix_clone_run_id ON clone (run_id);
CREATE INDEX ix_clone_state_id ON clone (state_id);
CREATE INDEX ix_edge_parent_id ON edge (parent_id);
CREATE INDEX ix_metric_key_metric_value_metric_state_id ON metric ("key", value, state_id);
CREATE INDEX ix_note_branch ON note (branch);
CREATE INDEX ix_note_state_id ON note (state_id);
CREATE INDEX ix_ref_state_id ON ref (state_id);
CREATE INDEX ix_ref_event_id ON ref_event (id) WHERE old_id IS NULL AND new_id IS NULL;
CREATE INDEX ix_ref_event_name_ref_event_id ON ref_event (name, id);
CREATE INDEX ix_attribute_key_attribute_text_attribute_state_id ON attribute ("key", text, state_id);
CREATE INDEX ix_setting_key_setting_text_setting_run_id ON setting ("key", text, run_id);
